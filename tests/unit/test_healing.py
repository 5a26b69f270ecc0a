"""Healing with a replacement that does what the test says: who is replaced, how often, and what is written down."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.fakes import config_of

from linckia.api.errors import FencedError
from linckia_trainer import healing
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.replace import Parts
from linckia_trainer.healing import Healer, UnhealableError, healed
from linckia_trainer.log import attempts, recoveries
from linckia_trainer.log.store import Store


class Group(ActorGroup):
    def status(self) -> list[dict[str, Any]]:
        return [{"generation": self.generation}]


class World:
    """A run of a policy and two engines; ``fate`` is asked at each replacement what becomes of it."""

    def __init__(self, tmp_path: Path, fate: Callable[[Group], Exception | None]) -> None:
        self.store = Store(str(tmp_path / "run"))
        self.fate = fate
        self.fenced: list[int] = []
        self.fenced_processes: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.caught_up: list[str] = []
        self.policy, *self.engines = (Group(name, [object()], 1, 1) for name in ("policy", "rollout-0", "rollout-1"))
        self.said: list[str] = []
        config = config_of(tmp_path, "recovery.back_off_seconds=0", "recovery.max_restarts_per_step=3")
        self.run: Any = SimpleNamespace(
            groups=[self.policy, *self.engines], stateful=[self.policy], engines=self.engines, step=4, attempt=1,
            stage_name="update", progress=SimpleNamespace(message=self.said.append), members={}, warn=self.said.append,
        )  # fmt: skip
        site: Any = SimpleNamespace(store=self.store, config=config, attempt=1)
        self.run.healer = self.healer = Healer(self.run, site, self.catch_up)

    def catch_up(self, groups: list[ActorGroup], parts: Parts) -> None:
        self.caught_up += [f"{group.name}/{group.generation}" for group in groups]

    def replace(self, site: Any, group: Group, parts: Parts, forming: Callable[[ActorGroup], None]) -> ActorGroup:
        with parts.part("fence"):
            self.fenced.append(group.generation)
        successor = Group(group.name, [object()], 1, group.generation + 1)
        forming(successor)
        if (error := self.fate(successor)) is not None:
            raise error
        return successor


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def make(fate: Callable[[Group], Exception | None] = lambda successor: None) -> World:
        made = World(tmp_path, fate)
        monkeypatch.setattr(healing, "replace", made.replace)
        monkeypatch.setattr(healing, "fence", lambda members, processes: made.fenced_processes.extend(processes))
        monkeypatch.setattr(healing.ray, "nodes", lambda: made.nodes)
        return made

    return make


def death(group: str = "policy", generation: int = 1) -> GroupLostError:
    return GroupLostError(group, generation, "death", "ActorDiedError", "it died")


def test_a_lost_group_is_replaced_once_and_brought_to_the_head(world: Callable[..., World]) -> None:
    at = world()
    at.healer.report(death())
    at.healer.report(death())  # the other ranks' calls fail too
    at.healer.settle(at.policy)
    at.healer.report(death())  # somebody is late
    at.healer.settle(at.policy)
    assert at.policy.generation == 2
    assert at.fenced == [1]
    assert at.caught_up == ["policy/2"]
    [found] = recoveries.recoveries(at.store)
    assert (found.group, found.generation_lost, found.generation, found.step, found.stage) == (
        "policy",
        1,
        2,
        4,
        "update",
    )
    assert found.seconds.keys() >= {"fence"}


def test_a_replaced_attempt_replaces_nothing(world: Callable[..., World]) -> None:
    at = world()
    for _ in range(2):
        attempts.claim(at.store, {}, takeover=True)
    at.healer.report(death())
    with pytest.raises(FencedError, match="attempt 1 was replaced"):
        at.healer.settle(at.policy)
    assert at.fenced == []
    assert recoveries.losses(at.store) == []


def test_the_work_is_done_again_on_the_healed_group(world: Callable[..., World]) -> None:
    at = world()
    results: list[Any] = [death(), death(generation=2), "done"]

    def work() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return str(result)

    assert healed(at.run, work, at.policy) == "done"
    assert at.policy.generation == 3
    assert at.caught_up == ["policy/2", "policy/3"]


def test_a_successor_that_is_lost_while_it_loads_is_replaced_in_the_same_recovery(world: Callable[..., World]) -> None:
    losses = [death(generation=2), None]
    at = world(lambda successor: losses.pop(0))
    at.healer.report(death())
    at.healer.settle(at.policy)
    assert len(recoveries.recoveries(at.store)) == 1
    assert len(recoveries.losses(at.store)) == 2


def test_a_successor_that_is_lost_once_it_is_loaded_is_fenced_and_replaced(world: Callable[..., World]) -> None:
    at = world()
    at.healer.report(death("rollout-0"))
    at.healer.await_one([at.engines[0]])
    at.healer.newest(at.engines[0]).processes = [{"node": "a", "node_id": "a", "pid": 7, "start_time": 1}]
    at.healer.report(death("rollout-0", generation=2))  # before it had its weights
    at.healer.await_one([at.engines[0]])
    assert at.engines[0].generation >= 2
    at.healer.refitted(at.engines, 0.1)
    assert len(recoveries.recoveries(at.store)) == 1
    assert at.fenced_processes[0]["pid"] == 7


def test_the_main_thread_alone_takes_a_successor_over(world: Callable[..., World]) -> None:
    at = world()
    at.healer.report(death())
    while at.healer.returning(at.policy):
        pass
    assert at.policy.generation == 1  # loaded, but not at the head: no call may reach it
    assert at.healer.newest(at.policy).generation == 2
    at.healer.settle(at.policy)
    assert at.policy.generation == 2


def test_a_group_that_is_lost_again_and_again_stops_the_run(world: Callable[..., World]) -> None:
    at = world(lambda successor: death(generation=successor.generation))
    at.healer.report(death())
    with pytest.raises(UnhealableError, match="max_restarts_per_step"):
        at.healer.settle(at.policy)
    with pytest.raises(UnhealableError):  # whatever else the run wants to do
        at.healer.settle()
    assert len(recoveries.losses(at.store)) == 4


def test_budgets_outlive_the_controller(world: Callable[..., World]) -> None:
    at = world()
    for generation in (1, 2):
        at.healer.report(death(generation=generation))
        at.healer.settle(at.policy)
    later = world(lambda successor: death(generation=successor.generation))
    later.healer.report(death())
    with pytest.raises(UnhealableError):
        later.healer.settle(later.policy)
    assert len(recoveries.losses(later.store)) == 4


def test_the_same_exception_twice_stops_the_run(world: Callable[..., World]) -> None:
    at = world()
    bug = [
        GroupLostError("policy", generation, "exception", "KeyError/model.py:forward", "KeyError: 'x'")
        for generation in (1, 2)
    ]
    with pytest.raises(UnhealableError, match=r"twice.*same exception") as caught:
        healed(at.run, lambda: (_ for _ in ()).throw(bug.pop(0)), at.policy)
    assert caught.value.fingerprint == "policy/update/KeyError/model.py:forward"


def test_a_lost_object_replaces_nobody(world: Callable[..., World]) -> None:
    at = world()
    at.healer.report(GroupLostError("policy", 1, "death", "ObjectLostError", "gone", whole=True))
    at.healer.settle(at.policy)
    assert (at.policy.generation, at.fenced) == (1, [])
    assert len(recoveries.losses(at.store)) == 1  # and yet it counts, or it might go on for ever


def test_an_engine_is_back_only_when_it_has_its_weights(world: Callable[..., World]) -> None:
    at = world()
    at.healer.report(death("rollout-1"))
    at.healer.await_one([at.engines[1]])
    assert at.healer.loaded(at.engines) == at.engines
    assert recoveries.recoveries(at.store) == []
    at.healer.refitted(at.engines, 0.5)
    assert [found.seconds["refit"] for found in recoveries.recoveries(at.store)] == [0.5]
    assert at.caught_up == []  # an engine holds no state


def test_an_engine_that_was_asked_for_and_has_no_place_is_given_up(world: Callable[..., World]) -> None:
    from linckia.api.errors import UserError

    at = world(lambda successor: UserError("placement.timeout", 1, "no place", "add nodes"))
    new = Group("rollout-2", [], 1, 0)
    at.run.groups.append(new)
    at.engines.append(new)
    at.healer.bring_up(new)
    while at.healer.returning(new):
        pass
    assert new not in at.healer.loaded(at.engines)
    assert new not in at.engines
    assert "cannot be added" in at.said[-1]


def test_a_lost_node_takes_all_its_groups_with_it(world: Callable[..., World]) -> None:
    at = world()
    for group, node in ((at.policy, "a"), (at.engines[0], "b"), (at.engines[1], "a")):
        group.processes = [{"node": node, "node_id": node, "pid": 1, "start_time": 1}]
    at.nodes = [{"NodeID": "a", "Alive": False}, {"NodeID": "b", "Alive": True}]
    at.healer.report(death())
    at.healer.settle(at.policy)
    at.healer.await_one([at.engines[1]])
    assert [group.generation for group in (at.policy, *at.engines)] == [2, 1, 2]
    assert {process["node"] for process in at.fenced_processes} == {"a"}
