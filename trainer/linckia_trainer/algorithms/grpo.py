"""GRPO: an answer is compared with the other answers to its prompt; no critic.

Shao et al., "DeepSeekMath" (2024), section 4.1. The paper averages the loss within each answer first; here, as in
every algorithm of this house, each trained token of a mini-batch weighs the same (``losses.py``).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import Algorithm as AlgorithmConfig
from linckia_trainer.algorithms.masks import Batch, group_sums, row_sums, trained_tokens

EPSILON = 1e-6


def advantages(batch: Batch, token_rewards: NDArray[np.float32], config: AlgorithmConfig) -> dict[str, NDArray[Any]]:
    """``advantages``, float32 [N, T]: the row's group-relative reward at each trained token, 0 outside the loss mask.

    A row's reward is the sum of its token rewards: the shaped scalar, less the KL penalty if that is in the reward.
    """
    mask = trained_tokens(batch)
    counted = np.flatnonzero(mask.any(axis=1))  # a row without a trained token is no answer to compare with
    relative = np.zeros(mask.shape[0], np.float64)
    relative[counted] = group_relative(
        row_sums(token_rewards, mask)[counted], batch["positions"][counted], divide=config.normalize_advantages
    )
    return {"advantages": np.where(mask, relative[:, None], 0.0).astype(np.float32)}


def group_relative(rewards: NDArray[np.float64], positions: NDArray[np.int64], divide: bool) -> NDArray[np.float64]:
    """[n]: (r - mean) / (std + epsilon) within each group, the rows of one position; ``rewards``, ``positions`` [n].

    The deviation is the sample one (divisor size - 1), as in the implementations people compare with; a group of one,
    or of equal rewards, gets 0. Without ``divide`` it is r - mean (Liu et al., "Understanding R1-Zero-Like Training",
    2025).
    """
    _, groups, sizes = np.unique(positions, return_inverse=True, return_counts=True)
    centred = rewards - (group_sums(rewards, groups, sizes.size) / sizes)[groups]
    if not divide:
        return centred
    deviation = np.sqrt(group_sums(centred**2, groups, sizes.size) / np.maximum(sizes - 1, 1))
    relative: NDArray[np.float64] = centred / (deviation[groups] + EPSILON)
    return relative
