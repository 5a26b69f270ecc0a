"""The metrics of a record: a pure function of it, so replay writes what the first writing wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia_trainer.metrics import names


def record_metrics(
    arrays: Mapping[str, NDArray[Any]], kl_coefficient: float, epoch: int, part_names: Sequence[str] = ()
) -> dict[str, float]:
    """Rewards, lengths, KL and the engine-trainer difference of one record.

    ``arrays``: the record's, rows [N], tokens [N, T]. ``kl_coefficient`` and ``epoch`` are in its header.
    """
    rewards, mask = arrays["rewards"].astype(np.float64), arrays["loss_mask"].astype(bool)
    answers = arrays["lengths"] - arrays["prompt_lengths"]
    difference = np.abs(arrays["rollout_log_probs"][mask] - arrays["old_log_probs"][mask])
    values = {
        names.REWARD: rewards.mean(),
        "reward/std": rewards.std(),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        names.ANSWER_TOKENS: answers.mean(),
        names.PROMPT_TOKENS: arrays["prompt_lengths"].mean(),
        names.FINISHED: arrays["finished"].mean(),
        names.LOG_PROB_DIFFERENCE: difference.mean() if difference.size else 0.0,
        names.LOG_PROB_DIFFERENCE_MAX: difference.max(initial=0.0),
        names.KL_COEFFICIENT: kl_coefficient,
        names.ROWS: len(rewards),
        names.TOKENS: arrays["lengths"].sum(),
        names.EPOCH: epoch,
    }
    if "reference_log_probs" in arrays and mask.any():
        old, reference = arrays["old_log_probs"][mask], arrays["reference_log_probs"][mask]
        values[names.KL] = (old.astype(np.float64) - reference).mean()
    for column, part in enumerate(part_names):
        values[names.REWARD_PART + part] = arrays["reward_parts"][:, column].mean(dtype=np.float64)
    return {name: float(value) for name, value in values.items()}
