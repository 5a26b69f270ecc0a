"""Experience in rows: assembling trajectories, splitting them over members, joining results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linckia_trainer.experience.batching import PADDING_ROW, assemble, shard, unshard
from linckia_trainer.experience.trajectory import Trajectory


def trajectory(position: int, sample: int, prompt: int, answer: int, finish: str = "stop") -> Trajectory:
    return Trajectory(
        position, sample,
        np.arange(10, 10 + prompt, dtype=np.int32),
        np.arange(50, 50 + answer, dtype=np.int32),
        np.linspace(-1, -2, answer, dtype=np.float32),
        finish, weight_step=4, policy_generation=1,
    )  # fmt: skip


def test_assemble_orders_rows_and_masks_answers_by_length() -> None:
    batch = assemble([trajectory(7, 1, 2, 1, "length"), trajectory(7, 0, 2, 3), trajectory(3, 0, 3, 2)], pad_token=0)
    assert batch["positions"].tolist() == [3, 7, 7]
    assert batch["samples"].tolist() == [0, 0, 1]
    assert batch["tokens"].tolist() == [[10, 11, 12, 50, 51], [10, 11, 50, 51, 52], [10, 11, 50, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch["lengths"].tolist() == [5, 5, 3]
    assert batch["prompt_lengths"].tolist() == [3, 2, 2]
    assert batch["finished"].tolist() == [1, 1, 0]
    assert batch["weight_steps"].tolist() == [4, 4, 4]
    assert batch["rollout_log_probs"][2].tolist() == [0, 0, -1, 0, 0]


def test_masks_do_not_come_from_token_ids() -> None:
    # The pad token is a real answer token here: it still counts.
    batch = assemble([trajectory(0, 0, 1, 1), trajectory(1, 0, 1, 3)], pad_token=50)
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no trajectories"),
        ([trajectory(1, 0, 1, 1), trajectory(1, 0, 2, 2)], r"two trajectories with the key .* \(1, 0\)"),
        ([trajectory(1, 0, 0, 1)], "empty prompt"),
    ],
)
def test_assemble_refuses(rows: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(rows, 0)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 6))
def test_shards_cover_every_row_once_and_join_again(lengths: list[int], num_shards: int) -> None:
    batch = {
        "lengths": np.array(lengths, np.int32),
        "tokens": np.arange(len(lengths) * 3).reshape(len(lengths), 3),
        "loss_mask": np.ones((len(lengths), 3), np.uint8),
    }
    for pad_rows in (True, False):
        shards, rows = shard(batch, num_shards, pad_rows)
        assert sorted(row for part in rows for row in part if row != PADDING_ROW) == list(range(len(lengths)))
        counts = [len(part["lengths"]) for part in shards]
        assert min(counts) > 0
        assert max(counts) - min(counts) <= (0 if pad_rows else 1)
        assert len(shards) == (num_shards if pad_rows else min(num_shards, len(lengths)))
        for part, indices in zip(shards, rows, strict=True):
            padding = indices == PADDING_ROW
            assert part["loss_mask"][padding].sum() == 0
            assert (part["lengths"][padding] >= 1).all()
            assert all(column.flags["C_CONTIGUOUS"] for column in part.values())
        joined = unshard([{"tokens": part["tokens"]} for part in shards], rows)
        assert (joined["tokens"] == batch["tokens"]).all()


def test_shards_are_balanced_by_tokens_and_always_the_same() -> None:
    lengths = np.array([100, 1, 1, 100, 50, 50, 1, 1], np.int32)
    batch = {"lengths": lengths, "loss_mask": np.ones((8, 1), np.uint8)}
    shards, rows = shard(batch, 2, pad_rows=True)
    assert [int(part["lengths"].sum()) for part in shards] == [152, 152]
    _, rows_again = shard(batch, 2, pad_rows=True)
    assert all((a == b).all() for a, b in zip(rows, rows_again, strict=True))


def test_unshard_refuses_wrong_results() -> None:
    with pytest.raises(ValueError, match="has 1 rows for a shard of 2"):
        unshard([{"x": np.zeros(1)}], [np.array([0, 1])])
    with pytest.raises(ValueError, match="different columns"):
        unshard([{"x": np.zeros(1)}, {"y": np.zeros(1)}], [np.array([0]), np.array([1])])
