"""Ray's state API through a hand-written server, and observations out of members' statuses."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from linckia.api.names import actor_name, beacon_name, parse_actor_name, placement_group_name
from linckia.observe.observation import ActorSeen, MemberSeen, NodeSeen, PlacementGroupSeen, RayState, group_seen
from linckia.observe.ray_state import RayStateClient, bearer, death_cause

Answer = Callable[[httpx.Request], httpx.Response]


def actor(name: str, state: str = "ALIVE", **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "pid": 11, "node_id": "n1", "num_restarts": "0"} | more


def listed(rows: list[dict[str, Any]], **more: Any) -> httpx.Response:
    inner = {"total": len(rows), "num_after_truncation": len(rows), "num_filtered": len(rows), "result": rows} | more
    return httpx.Response(200, json={"result": True, "msg": "", "data": {"result": inner}})


def client(answer: Answer, headers: dict[str, str] | None = None) -> RayStateClient:
    return RayStateClient("http://ray:8265", headers, transport=httpx.MockTransport(answer))


def look(actors: httpx.Response | None = None, nodes: httpx.Response | None = None) -> RayState:
    answers = {"/api/v0/actors": actors or listed([]), "/api/v0/nodes": nodes or listed([])}
    with client(lambda request: answers[request.url.path]) as asked:
        return asked.look("demo")


def test_actors_of_the_run_alone() -> None:
    killed = {"actor_died_error_context": {"reason": "WORKER_DIED", "error_message": " killed by SIGKILL \n"}}
    rows = [
        actor("demo/policy/1/0"),
        actor("demo/policy/1/1", "DEAD", death_cause=killed),
        actor("demo/rollout-0/3/0", "PENDING_CREATION", pid=0, node_id=None),
        actor("demo2/policy/1/0"),
        actor("", "ALIVE"),
        actor(None, "ALIVE"),  # type: ignore[arg-type]
    ]
    state = look(listed(rows))
    assert state.actors == (
        ActorSeen("demo/policy/1/0", "ALIVE", 11, "n1"),
        ActorSeen("demo/policy/1/1", "DEAD", 11, "n1", "WORKER_DIED", "killed by SIGKILL"),
        ActorSeen("demo/rollout-0/3/0", "PENDING_CREATION", None, None),
    )
    assert state.complete
    assert not state.problems


def test_nodes_and_placement_groups() -> None:
    answers = {
        "/api/v0/actors": listed([]),
        "/api/v0/nodes": listed(
            [
                {"node_id": "n1", "node_ip": "10.0.0.1", "state": "ALIVE"},
                {"node_id": "n2", "node_ip": "10.0.0.2", "state": "DEAD", "state_message": "health check failed"},
            ]
        ),
        "/api/v0/placement_groups": listed([{"name": "demo/pg/0", "state": "CREATED"}, {"name": "", "state": "X"}]),
    }
    with client(lambda request: answers[request.url.path]) as asked:
        state = asked.look("demo", placement_groups=True)
    assert state.nodes == (NodeSeen("n1", "10.0.0.1", True), NodeSeen("n2", "10.0.0.2", False, "health check failed"))
    assert state.placement_groups == (PlacementGroupSeen("demo/pg/0", "CREATED"),)


def test_what_is_asked() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return listed([])

    with client(answer, bearer("secret")) as one:
        one.look("demo")
    parameters = asked[0].url.params
    assert parameters.get_list("filter_keys") == ["ray_namespace"]
    assert parameters.get_list("filter_predicates") == ["="]
    assert parameters.get_list("filter_values") == ["linckia"]
    assert (parameters["limit"], parameters["detail"]) == ("10000", "1")
    assert [request.headers["Authorization"] for request in asked] == ["Bearer secret"] * 2
    assert [request.url.path for request in asked] == ["/api/v0/actors", "/api/v0/nodes"]


def failing(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def stalling(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("", request=request)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failing, "ConnectError: refused"),
        (stalling, "no answer in 2 s"),
        (lambda _: httpx.Response(401), "token is refused (HTTP 401)"),
        (lambda _: httpx.Response(403), "token is refused (HTTP 403)"),
        (lambda _: httpx.Response(500, json={"result": False, "msg": "GCS is down"}), "HTTP 500: GCS is down"),
        (lambda _: httpx.Response(200, json={"result": False, "msg": "GCS is down"}), "HTTP 200: GCS is down"),
        (lambda _: httpx.Response(302, headers={"location": "http://elsewhere"}), "HTTP 302"),
        (lambda _: httpx.Response(502, text="<html>"), "HTTP 502 without JSON"),
        (lambda _: httpx.Response(200, json=[]), "HTTP 200"),
        (lambda _: httpx.Response(200, json={"result": True, "data": None}), "another shape"),
        (lambda _: httpx.Response(200, json={"result": True, "data": {"result": {"result": ["x"]}}}), "another shape"),
        (lambda _: listed([], partial_failure_warning="2 nodes did not answer"), "2 nodes did not answer"),
        (lambda _: listed([{"name": "demo/policy/1/0", "state": "SLEEPING"}]), "'SLEEPING'"),
        (lambda _: listed([{"name": "demo/policy/1/0"}]), "KeyError"),
    ],
)
def test_an_api_that_fails_is_unknown_with_a_reason(answer: Answer, words: str) -> None:
    with client(answer) as asked:
        state = asked.look("demo")
    assert state.actors is None
    assert any(words in problem for problem in state.problems), state.problems


def test_one_part_that_fails_leaves_the_other() -> None:
    state = look(listed([actor("demo/policy/1/0")]), httpx.Response(500, json={"msg": "x"}))
    assert state.actors is not None
    assert state.nodes is None


def test_a_truncated_answer_says_so() -> None:
    assert not look(listed([actor("demo/policy/1/0")], num_filtered=10_001)).complete


def died(reason: str) -> dict[str, Any]:
    return {"actor_died_error_context": {"reason": reason, "error_message": "text"}}


@pytest.mark.parametrize(
    ("context", "cause", "message"),
    [
        (died("WORKER_DIED"), "WORKER_DIED", "text"),
        (died("RAY_KILL"), "RAY_KILL", "text"),
        (died("NODE_DIED"), "NODE_DIED", "text"),
        (died("OWNER_DIED"), "OWNER_DIED", "text"),
        (died("REF_DELETED"), "OUT_OF_SCOPE", "text"),
        (died("SOMETHING_NEW"), "UNKNOWN", "text"),
        ({"oom_context": {"error_message": "too much", "fail_immediately": True}}, "OUT_OF_MEMORY", "too much"),
        ({"runtime_env_failed_context": {"error_message": "no env"}}, "RUNTIME_ENV_FAILED", "no env"),
        ({"actor_unschedulable_context": {"error_message": "no room"}}, "UNSCHEDULABLE", "no room"),
        ({}, "UNKNOWN", ""),
        (None, "UNKNOWN", ""),
        ("dead", "UNKNOWN", ""),
        ({"actor_died_error_context": None}, "UNKNOWN", ""),
    ],
)
def test_causes_of_death(context: object, cause: str, message: str) -> None:
    assert death_cause(context) == (cause, message)


def test_a_pickle_in_an_answer_stays_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> Iterator[None]:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.loads", opened)
    text = "Traceback:\n  x.py\nValueError: no model\n"
    context = {"serialized_exception": "gASVDQAAAAAAAACMCW51bGw=", "formatted_exception_string": text}
    row = actor("demo/policy/1/0", "DEAD", death_cause={"creation_task_failure_context": context})
    (seen,) = look(listed([row])).actors or ()
    assert (seen.cause, seen.message) == ("CREATION_FAILED", "ValueError: no model")


def test_names_of_members() -> None:
    assert parse_actor_name(actor_name("demo", "rollout-0", 3, 1)) == ("demo", "rollout-0", 3, 1)
    others = [beacon_name("demo", 1, "10.0.0.7", 80), placement_group_name("demo", 0), "demo/keeper", "", "demo/p/x/0"]
    assert [parse_actor_name(name) for name in others] == [None] * 5


def test_a_group_out_of_its_members_statuses() -> None:
    status = {"generation": 2, "pid": 7, "node_id": "n1", "stage": "update", "progress": 5}
    group = group_seen("rollout-3", 2, [status, None, status | {"generation": 1}])
    assert (group.role, group.world_size) == ("rollout", 3)
    assert group.members == (
        MemberSeen(0, True, "update", 5, 7, "n1"),
        MemberSeen(1, False),
        MemberSeen(2, False),
    )
