"""The order of the hand-over on shared GPUs, which no CPU can run: asserted by recording who is called, and when."""

from typing import Any

import pytest
from unit.fakes import Answered

from linckia_trainer.weights import hybrid


class Recorder:
    """Stands for a group; writes down what it is asked."""

    def __init__(self, name: str, calls: list[tuple[str, str, tuple[Any, ...]]]) -> None:
        self.name = name
        self.calls = calls

    def start(self, method: str, *arguments: Any) -> Answered:
        self.calls.append((self.name, method, arguments))
        return Answered()


@pytest.fixture
def calls() -> list[tuple[str, str, tuple[Any, ...]]]:
    return []


def test_the_trainer_leaves_in_two_steps_around_the_sync(calls: list[Any]) -> None:
    policy, engine = Recorder("policy", calls), Recorder("engine", calls)
    hybrid.to_engines([policy], [engine], lambda: calls.append(("sync", "", ())))  # type: ignore[list-item]
    assert calls == [
        ("policy", "offload_optimizer", ()),
        ("engine", "wake", (["weights"],)),
        ("sync", "", ()),
        ("policy", "offload", ()),
        ("engine", "wake", (["kv_cache"],)),
    ]


def test_engines_sleep_before_the_trainer_returns(calls: list[Any]) -> None:
    policy, critic, engine = (Recorder(name, calls) for name in ("policy", "critic", "engine"))
    hybrid.to_training([policy, critic], [engine])  # type: ignore[list-item]
    assert calls == [("engine", "sleep", (2,)), ("policy", "reload", ()), ("critic", "reload", ())]
