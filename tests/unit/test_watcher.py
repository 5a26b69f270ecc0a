"""The watcher's thread and its single looks, with fakes for all it sees and does."""

import threading
from collections.abc import Sequence
from typing import Any

from unit.watched import policy

from linckia.decide.rules import Decision
from linckia.observe.observation import ActorSeen, RayState
from linckia_trainer.control.watcher import Watcher
from linckia_trainer.experience.trajectory import SampleRequest
from linckia_trainer.roles.rollout import RolloutMember

DEAD = RayState((ActorSeen("demo/policy/3/0", "DEAD", 7, "n1", "OUT_OF_MEMORY", ""),), (), ())
SILENT = RayState(problems=("actors: no answer in 2 s",))


class Fakes:
    """A run with one group of generation 3."""

    def __init__(self, **keys: Any) -> None:
        self.now = 0.0
        self.ray = RayState((), (), ())
        self.status: dict[str, Any] | None = {"stage": "update", "progress": 1, "generation": 3}
        self.acted: list[Decision] = []
        self.said: list[str] = []
        self.fails: Exception | None = None
        self.looked = threading.Event()
        self.watcher = Watcher(
            "demo", policy(**keys), self.statuses, self.ray_state, lambda: (4, "update"), self.act, self.said.append,
            clock=lambda: self.now,
        )  # fmt: skip

    def statuses(self) -> dict[str, tuple[int, Sequence[dict[str, Any] | None]]]:
        return {"policy": (3, [self.status])}

    def ray_state(self) -> RayState:
        self.looked.set()
        if self.fails is not None:
            raise self.fails
        return self.ray

    def act(self, decision: Decision) -> None:
        if self.fails is not None:
            raise self.fails
        self.acted.append(decision)


def test_what_is_dead_is_acted_on_once_and_said_once() -> None:
    fakes = Fakes()
    assert fakes.watcher.look() == []
    fakes.ray = DEAD
    (decision,) = fakes.watcher.look()
    assert (decision.group, decision.generation, decision.signal) == ("policy", 3, "OUT_OF_MEMORY")
    assert fakes.watcher.look() == []
    assert fakes.acted == [decision]
    assert fakes.said == ["restart policy: rank 0 of policy (pid 7) is dead, OUT_OF_MEMORY"]


def test_a_hang_is_found_by_its_clock() -> None:
    fakes = Fakes(hang_floor_seconds=20, first_time_factor=1)
    for _ in range(5):
        assert not fakes.acted
        fakes.watcher.look()
        fakes.now += 5
    fakes.watcher.look()
    assert [decision.kind for decision in fakes.acted] == ["hang"]


def test_what_cannot_be_done_is_tried_again_and_said_once() -> None:
    fakes = Fakes()
    fakes.ray = DEAD
    broken = fakes.watcher.act
    fakes.watcher.act = _refuse
    assert fakes.watcher.look() == []
    assert fakes.watcher.look() == []
    assert fakes.said[1:] == ["cannot restart policy: RuntimeError: another restart is under way"]
    fakes.watcher.act = broken
    assert len(fakes.watcher.look()) == 1


def _refuse(decision: Decision) -> None:
    raise RuntimeError("another restart is under way")


def test_a_silent_state_api_is_said_when_that_changes() -> None:
    fakes = Fakes()
    for state in (fakes.ray, SILENT, SILENT, fakes.ray, fakes.ray, SILENT):
        fakes.ray = state
        fakes.watcher.look()
    silent = "the Ray state API is silent: actors: no answer in 2 s"
    assert fakes.said == [silent, "it answers again", silent]


def test_the_thread_looks_until_it_is_closed_and_survives_a_look_that_fails() -> None:
    fakes = Fakes(watch_seconds=0.001, hang_floor_seconds=1)
    fakes.fails = OSError("no route")
    with fakes.watcher as watcher:
        assert fakes.looked.wait(30)
        fakes.looked.clear()
        assert fakes.looked.wait(30), "it looks again after a look that failed"
        fakes.fails = None
        fakes.ray = DEAD
        fakes.looked.clear()
        assert fakes.looked.wait(30)
    assert not watcher.thread.is_alive()
    assert fakes.said[0] == "the watcher could not look: OSError: no route"
    assert fakes.said.count(fakes.said[0]) == 1


def test_it_can_be_closed_before_it_was_started_and_twice() -> None:
    watcher = Fakes().watcher
    assert watcher.close()
    with watcher:
        pass
    assert watcher.close()


def test_it_decides_nothing_more_once_it_is_closed() -> None:
    fakes = Fakes()
    fakes.ray = DEAD
    fakes.watcher.close()
    assert fakes.watcher.look() == []
    assert fakes.acted == []


def test_an_engine_with_unfinished_prompts_is_seen_to_generate_whatever_call_waits() -> None:
    engine = RolloutMember.__new__(RolloutMember)  # no Ray, no vLLM: what it says of itself is all that is asked
    engine.version, engine.asked = (3, 1), {}
    assert engine.describe() == {"weight_version": (3, 1), "unfinished": 0}
    engine.asked = {"7/0/1": SampleRequest(7, 0, [1, 2], 1, 1.0)}
    assert engine.describe() == {"weight_version": (3, 1), "unfinished": 1, "stage": "generate"}
