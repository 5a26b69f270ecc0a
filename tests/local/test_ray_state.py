"""The state API of a real Ray: what dies is seen dead, with its cause, at once; what cannot be seen is not dead."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from linckia.api.names import NAMESPACE, actor_name
from linckia.observe.observation import ActorSeen
from linckia.observe.ray_state import RayStateClient

RUN = "seen"
LIMIT_SECONDS = 20.0  # Ray says it in 0.1 s; a loaded machine in a few


@ray.remote(num_cpus=0, max_restarts=0)
class Sleeper:
    """An actor that lives until it is killed; ``fails``: not even that long."""

    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("no such model")

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def client() -> Iterator[RayStateClient]:
    context = ray.init(
        address="local", namespace=NAMESPACE, num_cpus=1, include_dashboard=True, dashboard_port=0, log_to_driver=False
    )
    url = f"http://{context.address_info['webui_url']}"
    with RayStateClient(url, get_auth_headers_if_auth_enabled({}), timeout=10) as one:
        yield one
    ray.shutdown()


def start(name: str, **arguments: Any) -> Any:
    return Sleeper.options(name=name, namespace=NAMESPACE).remote(**arguments)  # type: ignore[attr-defined]


def await_seen(client: RayStateClient, name: str, wanted: Callable[[ActorSeen], bool]) -> tuple[ActorSeen, float]:
    """(the actor as it was seen, seconds until it was)."""
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_SECONDS:
        state = client.look(RUN)
        found = [one for one in state.actors or () if one.name == name and wanted(one)]
        if found:
            return found[0], time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"{name} was not seen so: {client.look(RUN)}")


def test_a_killed_process_is_seen_dead_with_its_cause(client: RayStateClient) -> None:
    name = actor_name(RUN, "policy", 1, 0)
    sleeper = start(name)
    pid = ray.get(sleeper.pid.remote())
    alive, _ = await_seen(client, name, lambda one: one.state == "ALIVE")
    assert (alive.pid, alive.node_id) == (pid, ray.get_runtime_context().get_node_id())

    os.kill(pid, signal.SIGKILL)
    dead, seconds = await_seen(client, name, lambda one: one.state == "DEAD")
    assert dead.cause == "WORKER_DIED", dead
    assert dead.message
    assert seconds < 5, "0.1 s on an idle machine"


def test_killed_by_ray(client: RayStateClient) -> None:
    name = actor_name(RUN, "critic", 1, 0)
    sleeper = start(name)
    ray.get(sleeper.pid.remote())
    ray.kill(sleeper)
    dead, _ = await_seen(client, name, lambda one: one.state == "DEAD")
    assert dead.cause == "RAY_KILL"


def test_an_actor_that_cannot_be_created(client: RayStateClient) -> None:
    name = actor_name(RUN, "reward", 1, 0)
    kept = start(name, fails=True)
    dead, _ = await_seen(client, name, lambda one: one.state == "DEAD")
    assert dead.cause == "CREATION_FAILED"
    assert "no such model" in dead.message
    del kept


def test_other_runs_and_nodes(client: RayStateClient) -> None:
    other = start("seen-too/policy/1/0")
    ray.get(other.pid.remote())
    group = ray.util.placement_group([{"CPU": 0.5}], name=f"{RUN}/pg/0")
    ray.get(group.ready())
    state = client.look(RUN, placement_groups=True)
    assert state.problems == ()
    assert state.actors is not None
    assert all(one.name.startswith(f"{RUN}/") for one in state.actors)
    assert [node.alive for node in state.nodes or ()] == [True]
    assert [(one.name, one.state) for one in state.placement_groups or ()] == [(f"{RUN}/pg/0", "CREATED")]
    ray.util.remove_placement_group(group)
    ray.kill(other)


def test_nobody_at_the_address() -> None:
    with RayStateClient("http://127.0.0.1:1") as nobody:
        state = nobody.look(RUN)
    assert state.actors is None
    assert state.nodes is None
    assert "ConnectError" in state.problems[0]
