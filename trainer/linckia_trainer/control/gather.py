"""What the watcher sees, gathered from Ray: members' statuses through their control groups, and the state API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from linckia.api.errors import FencedError
from linckia.observe.observation import RayState
from linckia.observe.ray_state import RayStateClient
from linckia_trainer.groups.group import ActorGroup


def ask_statuses(groups: Sequence[ActorGroup], timeout: float) -> Mapping[str, tuple[int, list[dict[str, Any] | None]]]:
    """For each group (generation, a status per rank), all asked at once; None for what failed or took over ``timeout`` s."""
    asked = {group.name: [member.status.remote(group.attempt) for member in group.members] for group in groups}
    refs = [ref for of_group in asked.values() for ref in of_group]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
    answered = set(ready)
    return {
        group.name: (group.generation, [_status(ref) if ref in answered else None for ref in asked[group.name]])
        for group in groups
    }


def _status(ref: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = ray.get(ref)
    except (ray.exceptions.RayError, FencedError):
        return None  # dead or fenced: the state API or the next call says which
    return found


def state_api(run: str, dashboard: str | None, timeout: float = 2.0) -> Callable[[], RayState]:
    """Looks at the state API at ``dashboard``, the ``webui_url`` (host:port) in ``ray.init().address_info``."""
    if not dashboard:
        return lambda: RayState(problems=("this Ray was started without its dashboard",))
    # Ray's own function: where its token lies is for Ray to know.
    client = RayStateClient(f"http://{dashboard}", get_auth_headers_if_auth_enabled({}), timeout)
    return lambda: client.look(run)
