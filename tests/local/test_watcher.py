"""The watcher on real members: one that works on, one whose work hangs, one that is stopped, one that is killed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from local import light

from linckia.api.config import Recovery
from linckia.api.names import NAMESPACE, actor_name
from linckia.decide.limits import WatchPolicy
from linckia.decide.rules import Decision
from linckia.observe.observation import RayState
from linckia_trainer.control.gather import ask_statuses, state_api
from linckia_trainer.control.watcher import Watcher
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.member import Identity

RUN = "watched"
LIMIT_SECONDS = 60.0
# Four seconds without progress are a hang here, so that the test need not wait for minutes.
POLICY = WatchPolicy(Recovery(watch_seconds=0.5, hang_floor_seconds=4, first_time_factor=1))


class Seen:
    """A watcher's decisions as they come."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.changed = threading.Condition()

    def act(self, decision: Decision) -> None:
        with self.changed:
            self.decisions.append(decision)
            self.changed.notify_all()

    def of(self, group: str) -> Decision:
        """The first decision about a group, once there is one."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.found(group), LIMIT_SECONDS), f"nothing was decided about {group}"
            return self.found(group)[0]

    def found(self, group: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.group == group]


@pytest.fixture(scope="module")
def look() -> Iterator[Callable[[], RayState]]:
    context = ray.init(
        address="local", namespace=NAMESPACE, num_cpus=4, include_dashboard=True, dashboard_port=0, log_to_driver=False
    )
    yield state_api(RUN, context.address_info["webui_url"], timeout=10)
    ray.shutdown()


def group(name: str, size: int = 1) -> ActorGroup:
    members = [
        ray.remote(concurrency_groups={"control": 2})(light.LightMember)
        .options(name=actor_name(RUN, name, 1, rank), namespace=NAMESPACE, num_cpus=0)
        .remote(Identity(RUN, name, 1, rank, size, 1), "cpu", 1, 900)
        for rank in range(size)
    ]
    started = ActorGroup(name, members, 1, 1)
    started.call("where")
    return started


def test_dead_hung_and_stopped_are_found_and_the_healthy_left_alone(look: Callable[[], RayState]) -> None:
    idle, works, hangs = group("reference"), group("policy", 2), group("critic")
    killed, stopped = group("reward"), group("rollout-0")
    groups = [idle, works, hangs, killed, stopped]
    pids = {one.name: one.status()[0]["pid"] for one in groups}
    seen = Seen()
    watcher = Watcher(
        RUN, POLICY, lambda: ask_statuses(groups, 2.0), look, lambda: (1, "update"), seen.act, say=lambda text: None
    )
    busy = [*works.start("work", 600.0), *stopped.start("work", 600.0), *hangs.start("work", 600.0, hangs=True)]
    try:
        with watcher:
            began = time.monotonic()
            os.kill(pids["reward"], signal.SIGKILL)
            death = seen.of("reward")
            seconds = time.monotonic() - began
            os.kill(pids["rollout-0"], signal.SIGSTOP)
            hang, stop = seen.of("critic"), seen.of("rollout-0")
        assert not watcher.thread.is_alive()
    finally:
        os.kill(pids["rollout-0"], signal.SIGCONT)
        for one in groups:
            one.kill()
    assert (death.kind, death.signal) == ("death", "WORKER_DIED")
    assert seconds < 15, "half a second between looks, 0.1 s for Ray to say it"
    assert hang.kind == "hang"
    assert "and it answers its control call" in hang.reason
    assert stop.kind == "hang"
    assert "it has not answered its control call for" in stop.reason
    assert not seen.found("policy"), "it works on"
    assert not seen.found("reference"), "it waits to be called"
    del busy


def test_a_ray_without_a_dashboard_is_unknown() -> None:
    state = state_api(RUN, None)()
    assert state.actors is None
    assert "without its dashboard" in state.problems[0]
