"""The generate stage against engines that finish what and when the test says: no answer is left behind."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linckia_trainer.experience import generation
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory


class Reference:
    """What a call on its way gives: told apart by identity."""

    def __init__(self, result: Any) -> None:
        self.result = result


class Engine:
    """Finishes as many answers at each ``take`` as ``takes`` says; ``refusal`` is what it says to prompts."""

    def __init__(self, takes: Iterator[int], refusal: Exception | None = None) -> None:
        self.takes = takes
        self.refusal = refusal
        self.unfinished: list[SampleRequest] = []
        self.most_unfinished = 0

    def start(self, method: str, *arguments: Any) -> list[Reference]:
        if method == "take":
            count = next(self.takes)
            done, self.unfinished = self.unfinished[:count], self.unfinished[count:]
            return [Reference([answer(request) for request in done])]
        if self.refusal:
            return [Reference(self.refusal)]
        self.unfinished += arguments[0]
        self.most_unfinished = max(self.most_unfinished, len(self.unfinished))
        return [Reference(None)]


def answer(request: SampleRequest) -> Trajectory:
    tokens, log_probs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    return Trajectory(request.position, request.sample, tokens, tokens, log_probs, "stop", 0, 1)


def get(references: Reference | list[Reference]) -> Any:
    if isinstance(references, list):
        return [get(one) for one in references]
    if isinstance(references.result, Exception):
        raise references.result
    return references.result


def sample(monkeypatch: pytest.MonkeyPatch, engines: Sequence[Engine], num_requests: int) -> list[Trajectory]:
    """Through engines of room for four prompts each."""

    def wait(references: list[Reference], num_returns: int) -> tuple[list[Reference], list[Reference]]:
        return references[:num_returns], references[num_returns:]

    monkeypatch.setattr(generation, "ray", SimpleNamespace(get=get, wait=wait))
    run: Any = SimpleNamespace(
        engines=engines,
        config=SimpleNamespace(rollout=SimpleNamespace(max_num_seqs=4)),
        count_tokens=lambda amount: None,
    )
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
    engines = [Engine(one) for one in takes]
    found = sample(monkeypatch, engines, num_requests=17)
    assert sorted(one.position for one in found) == list(range(17))
    assert all(engine.most_unfinished <= 4 for engine in engines)


def test_a_refused_prompt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine(repeat(1)), Engine(repeat(0), refusal=RuntimeError("stale"))]
    with pytest.raises(RuntimeError, match="stale"):
        sample(monkeypatch, engines, num_requests=3)
