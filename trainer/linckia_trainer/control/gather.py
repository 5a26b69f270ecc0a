"""What the watcher sees, gathered from Ray: every member's status through its control group, and the state API.

Asking is also the heartbeat of the controller: members that hear of nobody exit by themselves.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from linckia.api.errors import FencedError
from linckia.observe.observation import RayState
from linckia.observe.ray_state import RayStateClient
from linckia_trainer.groups.failure import GroupLostError, death_of
from linckia_trainer.groups.group import ActorGroup, Call
from linckia_trainer.run import Heard

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Lost = Callable[[GroupLostError], None]
Statuses = dict[str, tuple[int, list[dict[str, Any] | None]]]
"""group -> (generation, the status of each rank)."""


def hear(run: "Run", timeout: float) -> Statuses:
    """``ask_statuses`` of all that stands or is being brought up; keeps what is shown of the members, reports the dead.

    Raises FencedError when a newer attempt has taken over.
    """
    for standby in [standby for waiting in run.healer.site.standbys.values() for standby in list(waiting)]:
        standby.ask_status()  # nobody waits for it; it exits when it hears of nobody
    groups = [run.healer.newest(group) for group in run.groups]
    asked = time.monotonic()
    found = ask_statuses(groups, timeout, run.healer.report)
    run.heard = Heard(asked, found)
    for name, (_, members) in found.items():
        answers = [status for status in members if status is not None]
        if len(answers) == len(members):
            run.members[name] = answers
        for problem in {status["saving_problem"] for status in answers if status.get("saving_problem")}:
            run.warn(problem)
    return found


def ask_statuses(groups: Sequence[ActorGroup], timeout: float, lost: Lost = lambda loss: None) -> Statuses:
    """Ask every member of itself, all at once; None for one that failed or took over ``timeout`` seconds.

    ``lost`` hears of members whose process has ended. Raises FencedError when a newer attempt has taken over.
    """
    asked = [(group, group.ask_status()) for group in groups]
    refs = [ref for _, call in asked for ref in call]
    answered = set(ray.wait(refs, num_returns=len(refs), timeout=timeout)[0]) if refs else set()
    return {
        group.name: (call.generation, [_answer(call, ref, lost) if ref in answered else None for ref in call])
        for group, call in asked
    }


def _answer(call: Call, ref: Any, lost: Lost) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = ray.get(ref)
    except FencedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the member has said nothing of itself
        if (death := death_of(call.group, call.generation, error)) is not None:
            lost(death)
        return None
    return status


def state_api(run: str, dashboard: str | None, timeout: float = 2.0) -> Callable[[], RayState]:
    """Looks at the state API at ``dashboard``, the ``webui_url`` (host:port) in ``ray.init().address_info``."""
    if not dashboard:
        return lambda: RayState(problems=("this Ray was started without its dashboard",))
    # Ray's own function: where its token lies is for Ray to know.
    client = RayStateClient(f"http://{dashboard}", get_auth_headers_if_auth_enabled({}), timeout)
    return lambda: client.look(run)
