"""What every member says of itself, asked through its control group: also the heartbeat of the controller."""

from typing import TYPE_CHECKING, Any

import ray

from linckia.api.errors import FencedError
from linckia_trainer.groups.failure import is_death, lost
from linckia_trainer.groups.group import ActorGroup

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Statuses = dict[str, tuple[int, list[dict[str, Any] | None]]]


def ask_statuses(run: "Run", timeout: float) -> Statuses:
    """group -> (generation, the status of each rank; None for one that has not answered within ``timeout`` seconds).

    A group that is being replaced is asked in its next generation, once that has members. A member whose process has
    ended is reported at once. Raises FencedError when a newer attempt has taken over.
    """
    asked = [(group, group.ask_status()) for group in (run.healer.newest(one) for one in run.groups)]
    for standby in [standby for waiting in run.healer.site.standbys.values() for standby in list(waiting)]:
        standby.ask_status()  # they exit when they hear of nobody
    refs = [ref for _, call in asked for ref in call]
    answered = set(ray.wait(refs, num_returns=len(refs), timeout=timeout)[0]) if refs else set()
    found: Statuses = {}
    for group, call in asked:
        found[group.name] = (
            call.generation,
            [_answer(run, group, call.generation, ref, ref in answered) for ref in call],
        )
        if None not in found[group.name][1]:
            run.members[group.name] = [status for status in found[group.name][1] if status is not None]
    for member in [member for members in run.members.values() for member in members]:
        if member.get("saving_problem"):
            run.warn(member["saving_problem"])
    return found


def _answer(run: "Run", group: ActorGroup, generation: int, ref: Any, answered: bool) -> dict[str, Any] | None:
    if not answered:
        return None
    try:
        status: dict[str, Any] = ray.get(ref)
    except FencedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the member has said nothing of itself
        if is_death(error):
            loss = lost(group.name, generation, error)
            assert loss is not None
            run.healer.report(loss)
        return None
    return status
