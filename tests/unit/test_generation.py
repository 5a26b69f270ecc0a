"""The generate stage against engines that finish what and when the test says: no answer is left behind."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.fakes import Answered, Healer

from linckia_trainer.experience import generation
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory
from linckia_trainer.groups.failure import GroupLostError


class Engine:
    """Finishes as many answers at each ``take`` as ``takes`` says; an error among them is what the take raises instead."""

    def __init__(self, name: str, takes: Iterator[int | Exception], refusal: Exception | None = None) -> None:
        self.name = name
        self.generation = 1
        self.takes = takes
        self.refusal = refusal
        self.unfinished: list[SampleRequest] = []
        self.most_unfinished = 0

    def start(self, method: str, *arguments: Any) -> Answered:
        if method == "take":
            count = next(self.takes)
            if isinstance(count, Exception):
                self.unfinished = []
                return Answered(count)
            done, self.unfinished = self.unfinished[:count], self.unfinished[count:]
            return Answered([answer(request) for request in done])
        if self.refusal:
            return Answered(self.refusal)
        self.unfinished += arguments[0]
        self.most_unfinished = max(self.most_unfinished, len(self.unfinished))
        return Answered(None)


def answer(request: SampleRequest) -> Trajectory:
    tokens, log_probs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    return Trajectory(request.position, request.sample, tokens, tokens, log_probs, "stop", 0, 1)


def run_of(engines: Sequence[Engine]) -> Any:
    return SimpleNamespace(
        engines=engines,
        hybrid=False,
        wanted_engines=None,
        policy=SimpleNamespace(name="policy"),
        log=SimpleNamespace(head=lambda: 0),
        weights=SimpleNamespace(serves=lambda engine, step: True),
        healer=Healer(engines),
        config=SimpleNamespace(rollout=SimpleNamespace(max_num_seqs=4)),
        count_tokens=lambda amount: None,
    )


def sample(monkeypatch: pytest.MonkeyPatch, run: Any, num_requests: int) -> list[Trajectory]:
    """Through engines of room for four prompts each."""

    def wait(refs: list[Answered], num_returns: int, timeout: float) -> tuple[list[Answered], list[Answered]]:
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(generation, "ray", SimpleNamespace(wait=wait))
    return generation.sample(run, [SampleRequest(position, 0, [1], position) for position in range(num_requests)])


@pytest.mark.parametrize(
    "takes",
    [
        [repeat(1)],
        [chain([0] * 5, repeat(1))],  # a take that ran out of time brings nothing
        [chain([0] * 5, repeat(3)), repeat(1)],
        [repeat(4), chain([1] * 2, [0] * 9, repeat(2))],
    ],
)
def test_every_answer_is_waited_for(takes: list[Iterator[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine(f"rollout-{number}", one) for number, one in enumerate(takes)]
    found = sample(monkeypatch, run_of(engines), num_requests=17)
    assert sorted(one.position for one in found) == list(range(17))
    assert all(engine.most_unfinished <= 4 for engine in engines)


def test_what_a_lost_engine_has_not_answered_is_answered_by_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = GroupLostError("rollout-0", 1, "death", "ActorDiedError", "died")
    run = run_of([Engine("rollout-0", chain([1], [lost], repeat(1))), Engine("rollout-1", repeat(1))])
    found = sample(monkeypatch, run, num_requests=17)
    assert sorted(one.position for one in found) == list(range(17))
    assert run.healer.losses == [lost]
    assert run.healer.costs.generated_again == 4  # it was full


def test_an_engine_that_was_replaced_unseen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, other = Engine("rollout-0", repeat(1)), Engine("rollout-1", repeat(1))

    def takes() -> Iterator[int | Exception]:
        yield 1
        replaced.unfinished, replaced.generation = [], 2  # by the watcher, between two takes
        yield from repeat(1)

    replaced.takes = takes()
    found = sample(monkeypatch, run_of([replaced, other]), num_requests=17)
    assert sorted(one.position for one in found) == list(range(17))


def test_a_refused_prompt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine("rollout-0", repeat(1)), Engine("rollout-1", repeat(0), refusal=ValueError("too long"))]
    with pytest.raises(ValueError, match="too long"):
        sample(monkeypatch, run_of(engines), num_requests=3)
