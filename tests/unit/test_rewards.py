"""Reward functions: what they may return, and how each failure names its sample."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linckia.api.config import ReasoningGym
from linckia.api.errors import UserError
from linckia_trainer.experience.rewards import RewardError, load_function, score, verifier
from linckia_trainer.groups.failure import lost

PROMPTS, ANSWERS, EXAMPLES = ["ask a", "ask b", "ask c"], ["1", "2", "3"], [{}, {}, {}]
KEYS = [(7, 0), (7, 1), (8, 0)]


def run(function: Callable[..., Any], weights: dict[str, float] | None = None) -> Any:
    return score(function, PROMPTS, ANSWERS, EXAMPLES, weights or {}, KEYS)


def test_plain_numbers() -> None:
    scores = run(lambda p, a, e: [float(x) for x in a])
    assert scores.rewards.tolist() == [1.0, 2.0, 3.0]
    assert scores.parts.shape == (3, 0)
    assert scores.names == []


def test_named_parts_are_weighted_and_kept() -> None:
    scores = run(lambda p, a, e: [{"right": float(x), "brief": 1} for x in a], {"right": 2.0})
    assert scores.names == ["brief", "right"]
    assert scores.rewards.tolist() == [3.0, 5.0, 7.0]
    assert scores.parts.tolist() == [[1, 1], [1, 2], [1, 3]]
    assert scores.rewards.dtype == np.float32


def raises_on_two(prompts: list[str], answers: list[str], examples: list[Any]) -> list[float]:
    if "2" in answers:
        raise KeyError("no such digit")
    return [0.0 for _ in answers]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises_on_two, ["position 7", "sample 1", "ask b", "no such digit"]),
        (lambda p, a, e: [0.0, float("nan"), 0.0], ["position 7", "sample 1", "nan"]),
        (lambda p, a, e: [0.0, 0.0, float("inf")], ["position 8", "sample 0", "inf"]),
        (lambda p, a, e: [0.0], ["1", "3"]),
        (lambda p, a, e: [0.0, "good", 0.0], ["position 7", "sample 1", "good"]),
        (lambda p, a, e: [{"x": 1}, {"y": 1}, {"x": 1}], ["position 7", "sample 1", "y"]),
        (lambda p, a, e: [{"x": 1}, 2.0, {"x": 1}], ["position 7", "sample 1"]),
    ],
)
def test_failures_name_the_sample(function: Callable[..., Any], words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        run(function)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.next_step


def test_no_memory_is_not_a_mistake_in_the_function() -> None:
    calls = []

    def hungry(prompts: Any, answers: Any, examples: Any) -> Any:
        calls.append(len(answers))
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        run(hungry)
    assert calls == [3]  # it is not called again to find a culprit
    loss = lost("reward", 1, caught.value)
    assert loss is not None
    assert (loss.kind, loss.cause) == ("exception", "MemoryError: MemoryError")


def test_a_weight_without_a_part_is_named() -> None:
    with pytest.raises(RewardError, match="spelling"):
        run(lambda p, a, e: [{"x": 1}] * 3, {"spelling": 1.0})


def test_the_same_failure_has_the_same_fingerprint() -> None:
    def failure(function: Callable[..., Any]) -> Any:
        with pytest.raises(RewardError) as caught:
            run(function)
        return caught.value.fingerprint

    assert failure(raises_on_two) == failure(raises_on_two)
    assert failure(raises_on_two) != failure(lambda p, a, e: [float("nan")] * 3)


def test_load_function_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(p, a, e):\n    return [1.0 for _ in a]\nnumber = 3\n")
    assert load_function(f"{file}:reward")([], ["x"], []) == [1.0]
    for spec, words in {
        f"{tmp_path / 'none.py'}:reward": "none.py",
        f"{file}:rewrad": "reward",
        f"{file}:number": "number",
    }.items():
        with pytest.raises(UserError, match=words):
            load_function(spec)
    file.write_text("import os\nraise RuntimeError('half done')\n")
    with pytest.raises(UserError, match="half done") as caught:
        load_function(f"{file}:reward")
    assert "2" in str(caught.value)  # the line


def test_the_verifier_of_a_task_knows_the_right_answer() -> None:
    import reasoning_gym

    task = ReasoningGym(task="chain_sum", size=3, seed=1, options={"min_terms": 2, "max_terms": 2})
    entries = list(reasoning_gym.create_dataset("chain_sum", size=3, seed=1, min_terms=2, max_terms=2))
    right = [entry["answer"] for entry in entries]
    questions = [entry["question"] for entry in entries]
    verify = verifier(task)
    assert list(verify(questions, right, entries)) == [1.0, 1.0, 1.0]
    assert list(verify(questions, [f"so <answer>{one}</answer>" for one in right], entries)) == [1.0, 1.0, 1.0]
    assert max(verify(questions, ["no idea"] * 3, entries)) < 1.0
