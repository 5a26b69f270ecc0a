"""Ray's state API over REST: the actors, nodes and placement groups of a run.

The dashboard answers in about 10 ms. Nothing it returns is ever unpickled: some fields hold pickles that anyone in the
cluster could have made.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import httpx

from linckia.api.names import NAMESPACE
from linckia.observe.observation import ActorSeen, ActorState, Cause, NodeSeen, PlacementGroupSeen, RayState

Row = Mapping[str, Any]
Seen = TypeVar("Seen")
Filter = tuple[str, str, str]
"""(key, ``=`` or ``!=``, value)"""

LIMIT = 10_000  # the most that Ray returns; it counts DEAD actors too
MESSAGE_LENGTH = 500

# Ray's own names where ours say more.
_REASONS: Mapping[str, Cause] = {"REF_DELETED": "OUT_OF_SCOPE"}
_CONTEXTS: Mapping[str, Cause] = {
    "creation_task_failure_context": "CREATION_FAILED",
    "runtime_env_failed_context": "RUNTIME_ENV_FAILED",
    "actor_unschedulable_context": "UNSCHEDULABLE",
    "oom_context": "OUT_OF_MEMORY",
}


class StateApiError(Exception):
    """The state API did not answer, or not with what can be used; its text says why."""


def bearer(token: str) -> dict[str, str]:
    """The header with which Ray's dashboard takes a token."""
    return {"Authorization": f"Bearer {token}"}


class RayStateClient:
    """Asks one dashboard. Every request ends within ``timeout`` seconds; what fails is None with a reason.

    ``url``: the dashboard's address, such as ``http://10.0.0.2:8265``. ``headers``: what proves who asks, such as
    ``bearer(token)``; Ray's own default asks for a token, on one machine too. The state API answers with at most 10,000
    entries; actors are asked for in our namespace alone.

    Example: ``with RayStateClient("http://127.0.0.1:8265") as client: state = client.look("sort-seed1")``
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        timeout: float = 2.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.timeout = timeout
        # trust_env off: a proxy of the environment must not come between a controller and its own cluster.
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, trust_env=False, transport=transport, follow_redirects=False
        )

    def __enter__(self) -> "RayStateClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def look(self, run: str, placement_groups: bool = False) -> RayState:
        """The run's actors and all nodes; with ``placement_groups`` those too. Never raises for an API that fails."""
        problems: list[str] = []
        complete = True

        def ask(resource: str, *filters: Filter) -> list[Row] | None:
            nonlocal complete
            try:
                rows, whole = self.rows(resource, *filters)
            except StateApiError as error:
                problems.append(f"{resource}: {error}")
                return None
            complete &= whole
            return rows

        actors = _parsed(
            ask("actors", ("ray_namespace", "=", NAMESPACE)), lambda row: _of_run(row, run), actor_seen, problems
        )
        nodes = _parsed(ask("nodes"), lambda row: True, node_seen, problems)
        groups = None
        if placement_groups:
            rows = ask("placement_groups")
            groups = _parsed(rows, lambda row: _of_run(row, run), placement_group_seen, problems)
        return RayState(actors, nodes, groups, tuple(problems), complete)

    def rows(self, resource: str, *filters: Filter) -> tuple[list[Row], bool]:
        """(entries of ``actors``, ``nodes`` or ``placement_groups``, whether these are all).

        Raises StateApiError for no answer in time, a refused token, an answer that only a part of the cluster gave, or
        one of another shape.
        """
        parameters: list[tuple[str, str | int | float | bool | None]] = [
            ("limit", str(LIMIT)),
            ("detail", "1"),
            ("timeout", str(max(1, int(self.timeout)))),
        ]
        for key, predicate, value in filters:
            parameters += [("filter_keys", key), ("filter_predicates", predicate), ("filter_values", value)]
        try:
            answer = self.http.get(f"/api/v0/{resource}", params=tuple(parameters))
        except httpx.TimeoutException as error:
            raise StateApiError(f"no answer in {self.timeout:g} s") from error
        except httpx.HTTPError as error:
            raise StateApiError(f"{type(error).__name__}: {error}") from error
        if answer.status_code in (401, 403):
            raise StateApiError(f"the token is refused (HTTP {answer.status_code})")
        return _unwrap(answer)


def _unwrap(answer: httpx.Response) -> tuple[list[Row], bool]:
    try:
        body = answer.json()
    except ValueError as error:
        raise StateApiError(f"HTTP {answer.status_code} without JSON") from error
    if not answer.is_success or not isinstance(body, dict) or not body.get("result"):
        said = body.get("msg") if isinstance(body, dict) else None
        raise StateApiError(f"HTTP {answer.status_code}: {str(said)[:MESSAGE_LENGTH]}")
    data = body.get("data")
    data = data.get("result") if isinstance(data, dict) else None
    rows = data.get("result") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StateApiError("an answer of another shape")
    if warning := data.get("partial_failure_warning"):
        raise StateApiError(f"only a part of the cluster answered: {str(warning)[:MESSAGE_LENGTH]}")
    found = data.get("num_filtered")
    return rows, not isinstance(found, int) or found <= len(rows)


def _parsed(
    rows: list[Row] | None, wanted: Callable[[Row], bool], parse: Callable[[Row], Seen], problems: list[str]
) -> tuple[Seen, ...] | None:
    """Every row that is wanted, parsed; None, with a reason, if one cannot be: a Ray whose words we do not know."""
    if rows is None:
        return None
    try:
        return tuple(parse(row) for row in rows if wanted(row))
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"an entry that cannot be read: {type(error).__name__}: {error}")
        return None


def _of_run(row: Row, run: str) -> bool:
    return str(row.get("name") or "").startswith(f"{run}/")


def actor_seen(row: Row) -> ActorSeen:
    """An actor of the API's answer. KeyError or ValueError for what no Ray we know of says."""
    state = row["state"]
    if state not in get_args(ActorState):
        raise ValueError(f"actor state {state!r}")
    cause, message = death_cause(row.get("death_cause")) if state == "DEAD" else (None, "")
    return ActorSeen(str(row["name"]), state, row.get("pid") or None, row.get("node_id") or None, cause, message)


def death_cause(context: object) -> tuple[Cause, str]:
    """(cause, Ray's words) of a dead actor's ``death_cause``, which holds one context of several kinds.

    Example: ``death_cause({"actor_died_error_context": {"reason": "RAY_KILL", "error_message": "..."}})`` is
    ``("RAY_KILL", "...")``.
    """
    if not isinstance(context, Mapping):
        return "UNKNOWN", ""
    for key, cause in _CONTEXTS.items():
        if key in context:
            return cause, _message(context[key])
    died = context.get("actor_died_error_context")
    if not isinstance(died, Mapping):
        return "UNKNOWN", _message(context)
    reason = str(died.get("reason", ""))
    found = _REASONS.get(reason, reason)
    return (found if found in get_args(Cause) else "UNKNOWN"), _message(died)  # type: ignore[return-value]


def _message(context: object) -> str:
    if not isinstance(context, Mapping):
        return ""
    if text := str(context.get("error_message") or "").strip():
        return text[:MESSAGE_LENGTH]
    lines = str(context.get("formatted_exception_string") or "").strip().splitlines()
    return lines[-1].strip()[:MESSAGE_LENGTH] if lines else ""  # a traceback ends with what was raised


def node_seen(row: Row) -> NodeSeen:
    state = row["state"]
    if state not in ("ALIVE", "DEAD"):
        raise ValueError(f"node state {state!r}")
    return NodeSeen(str(row["node_id"]), str(row["node_ip"]), state == "ALIVE", str(row.get("state_message") or ""))


def placement_group_seen(row: Row) -> PlacementGroupSeen:
    return PlacementGroupSeen(str(row["name"]), str(row["state"]))
