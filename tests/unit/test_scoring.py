"""Scoring a batch through the reward group: a failure is tried twice, a silent reward is named."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.fakes import Healer

from linckia.api.errors import UserError
from linckia_trainer.experience.prompts import Prompt, PromptSet
from linckia_trainer.experience.rewards import RewardError, Scores, score
from linckia_trainer.experience.scoring import score_rewards
from linckia_trainer.groups.failure import GroupLostError


class Group:
    """Stands for the reward group: each call takes the next of the prepared answers."""

    name = "reward"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.columns: dict[str, Any] = {}

    def call_sharded(self, method: str, columns: dict[str, Any], pad_rows: bool) -> "Group":
        assert (method, pad_rows) == ("score", False)
        self.columns = columns
        self.rows = [np.arange(2)]
        return self

    def results(self, timeout: float) -> list[Scores]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer]


def run(group: Group) -> Any:
    said: list[str] = []
    return SimpleNamespace(
        reward=group,
        healer=Healer(),
        tokenizer=SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(map(chr, tokens))),
        prompt_index=lambda position, prompts: position,
        config=SimpleNamespace(reward=SimpleNamespace(timeout=5.0)),
        warn=said.append,
        said=said,
    )


PROMPTS = PromptSet([Prompt("a?", [97, 63], {"n": 0}), Prompt("b?", [98, 63], {"n": 1})], "hash")
BATCH = {
    "tokens": np.array([[97, 63, 120, 121], [98, 63, 122, 0]], np.int32),
    "prompt_lengths": np.array([2, 2], np.int32),
    "lengths": np.array([4, 3], np.int32),
    "positions": np.array([0, 1]),
    "samples": np.array([0, 0], np.int32),
}
GOOD = Scores(np.array([1.0, 2.0], np.float32), np.zeros((2, 1), np.float32), ["part"])


def failure() -> RewardError:
    with pytest.raises(RewardError) as caught:
        score(lambda p, a, e: [float("nan")], ["a?"], ["xy"], [{}], {}, [(0, 0)])
    return caught.value


def test_the_reward_sees_texts_and_examples() -> None:
    group = Group(GOOD)
    rewards, names = score_rewards(run(group), BATCH, PROMPTS)
    assert rewards["rewards"].tolist() == [1.0, 2.0]
    assert names == ("part",)
    assert list(group.columns["prompts"]) == ["a?", "b?"]
    assert list(group.columns["answers"]) == ["xy", "z"]
    assert list(group.columns["examples"]) == [{"n": 0}, {"n": 1}]


def test_one_failure_is_tried_again_and_said() -> None:
    group = Group(failure(), GOOD)
    state = run(group)
    rewards, _ = score_rewards(state, BATCH, PROMPTS)
    assert rewards["rewards"].tolist() == [1.0, 2.0]
    assert "tried once more" in state.said[0]


def test_a_lost_group_is_asked_again_when_it_is_healed() -> None:
    lost = GroupLostError("reward", 1, "death", "ActorDiedError", "died")
    state = run(Group(lost, lost, GOOD))
    rewards, _ = score_rewards(state, BATCH, PROMPTS)
    assert rewards["rewards"].tolist() == [1.0, 2.0]
    assert state.healer.losses == [lost, lost]


def test_the_same_failure_twice_stops_and_names_the_sample() -> None:
    with pytest.raises(RewardError, match="position 0"):
        score_rewards(run(Group(failure(), failure(), GOOD)), BATCH, PROMPTS)


def test_a_reward_that_does_not_answer_is_named() -> None:
    with pytest.raises(UserError, match=r"reward\.timeout"):
        score_rewards(run(Group(TimeoutError())), BATCH, PROMPTS)
