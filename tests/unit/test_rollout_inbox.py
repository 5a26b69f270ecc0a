"""An engine that steps without end hears every call after the step it is in."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from unit.algorithms_batches import run_config

from linckia_trainer.experience.trajectory import SampleRequest
from linckia_trainer.groups.member import Identity
from linckia_trainer.roles.rollout import RolloutMember

PATIENCE = 10.0


class EndlessEngine:
    """Always has work; each step ends when the test says so. What it was asked to do stands in ``heard``, with the step."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.steps = 0
        self.heard: list[tuple[str, int]] = []

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self) -> list[Any]:
        assert self.go.acquire(timeout=PATIENCE)
        self.steps += 1
        return []

    def add_request(self, name: str, prompt: dict[str, Any], settings: Any) -> None:
        self.heard.append((name, self.steps))

    def sleep(self, level: int) -> None:
        self.heard.append((f"sleep {level}", self.steps))

    def wake_up(self, tags: list[str] | None) -> None:
        raise ValueError("it sleeps on")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> RolloutMember:
    vllm, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = parameters.SamplingParams = dict  # type: ignore[attr-defined]
    parameters.RequestOutputKind = type("Kind", (), {"FINAL_ONLY": 0})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    found = RolloutMember(Identity("run", "rollout-0", 1, 0, 1, 1), "cpu", 1, float("inf"))
    found.config, found.version, found.engine = run_config({}), (0, 1), EndlessEngine()
    threading.Thread(target=found._drive, daemon=True).start()
    return found


def steps_until_answered(member: RolloutMember, call: Any) -> int:
    """How many steps the engine made before ``call`` came back; at most three are allowed to it."""
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    before = member.engine.steps
    while caller.is_alive() and member.engine.steps < before + 3:
        member.engine.go.release()
        caller.join(0.3)
    assert not caller.is_alive(), "it starves"
    return int(member.engine.steps - before)


def test_calls_do_not_starve_and_keep_their_order(member: RolloutMember) -> None:
    first = [SampleRequest(position, 0, [1], 7) for position in range(3)]
    assert steps_until_answered(member, lambda: member.submit(first)) <= 2
    assert steps_until_answered(member, member.sleep) <= 2
    assert steps_until_answered(member, lambda: member.submit([SampleRequest(9, 1, [1], 8)])) <= 2
    assert [name for name, _ in member.engine.heard] == ["0/0/7", "1/0/7", "2/0/7", "sleep 1", "9/1/8"]
    assert len({step for _, step in member.engine.heard[:3]}) == 1  # one submit goes in whole


def test_an_error_reaches_the_caller_and_nobody_else(member: RolloutMember) -> None:
    raised: list[Exception] = []

    def wake() -> None:
        try:
            member.wake()
        except ValueError as error:
            raised.append(error)

    assert steps_until_answered(member, wake) <= 2
    assert str(raised[0]) == "it sleeps on"
    assert steps_until_answered(member, member.sleep) <= 2


def test_a_failed_engine_still_answers_with_its_failure(member: RolloutMember) -> None:
    def fails() -> list[Any]:
        raise RuntimeError("the device is gone")

    def patch() -> None:
        member.engine.step = fails

    steps_until_answered(member, lambda: member.inbox.ask(patch))
    member.asked["0/0/7"] = SampleRequest(0, 0, [1], 7)
    with pytest.raises(RuntimeError, match="the device is gone"):
        member.take(1, PATIENCE)
    with pytest.raises(RuntimeError, match="the device is gone"):
        member.submit([SampleRequest(0, 0, [1], 7)])
