"""Random records for the tests of the algorithms."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import RunConfig

ALIGNED = ("tokens", "loss_mask", "rollout_log_probs", "old_log_probs", "reference_log_probs", "values")


def random_batch(seed: int) -> dict[str, NDArray[Any]]:
    """A record of 1-3 samples for each of 1-5 prompts.

    Answers have untrained tokens in them, now and then a row has no trained token at all, and wherever the loss mask is
    0 stands NaN, which no result may see.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, size=rng.integers(1, 6))
    positions = np.repeat(100 + np.arange(sizes.size), sizes)
    num_rows = positions.size
    prompt_lengths = rng.integers(1, 5, size=num_rows)
    lengths = prompt_lengths + rng.integers(1, 9, size=num_rows)
    columns = np.arange(lengths.max())
    answer = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
    mask = answer & (rng.random(answer.shape) < 0.8)
    mask[rng.random(num_rows) < 0.1] = False

    def aligned(low: float, high: float) -> NDArray[np.float32]:
        return np.where(mask, rng.uniform(low, high, mask.shape), np.nan).astype(np.float32)

    old = aligned(-4, -0.1)
    return {
        "tokens": rng.integers(0, 50, mask.shape).astype(np.int32),
        "prompt_lengths": prompt_lengths.astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "loss_mask": mask.astype(np.uint8),
        "rollout_log_probs": old,
        "old_log_probs": old,
        "reference_log_probs": old + aligned(-0.5, 0.5),
        "values": aligned(-2, 2),
        "rewards": rng.choice([0.0, 0.5, 1.0, 3.0], num_rows).astype(np.float32),
        "positions": positions.astype(np.int64),
        "samples": np.concatenate([np.arange(size) for size in sizes]).astype(np.int32),
    }


def widen(batch: dict[str, NDArray[Any]], extra: int) -> dict[str, NDArray[Any]]:
    """The same rows, padded by ``extra`` further columns."""
    return {k: np.pad(v, ((0, 0), (0, extra))) if k in ALIGNED else v for k, v in batch.items()}


def run_config(algorithm: dict[str, Any], reward: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": {"file": "prompts.jsonl"}, "prompts_per_step": 16, "samples_per_prompt": 2},
            "reward": {"function": "reward.py:score", **(reward or {})},
            "algorithm": algorithm,
        }
    )
