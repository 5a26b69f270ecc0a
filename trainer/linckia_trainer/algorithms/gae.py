"""Generalised advantage estimation over right-padded answers, and whitening."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-8


def advantages_and_returns(
    rewards: NDArray[Any], values: NDArray[Any], mask: NDArray[np.bool_], gamma: float, lam: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Schulman et al., "High-Dimensional Continuous Control Using GAE" (2016), eq. 11-16, for all rows at once.

    ``rewards``, ``values`` and ``mask`` are [N, T]; ``values[:, t]`` is the value of the state before token t. A row's
    steps are its trained tokens in order: tokens outside the mask are passed over, so the step after a token is the
    next trained one. delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next; after the last trained
    token V_next and A_next are 0, also for an answer that was cut off: nobody has valued the state behind it.

    Returns (advantages, advantages + values), both float64 [N, T] and 0 outside the mask.
    """
    num_rows, width = mask.shape
    advantages = np.zeros((num_rows, width), np.float64)
    next_value = np.zeros(num_rows, np.float64)
    next_advantage = np.zeros(num_rows, np.float64)
    for t in range(width - 1, -1, -1):
        trained = mask[:, t]
        if not trained.any():
            continue
        value = values[:, t].astype(np.float64)
        delta = rewards[:, t] + gamma * next_value - value
        advantages[:, t] = np.where(trained, delta + gamma * lam * next_advantage, 0.0)
        next_advantage = np.where(trained, advantages[:, t], next_advantage)
        next_value = np.where(trained, value, next_value)
    return advantages, np.where(mask, advantages + values, 0.0)


def whiten(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """``values`` [N, T] with mean 0 and (population) standard deviation 1 over the trained tokens, 0 elsewhere.

    The statistics are those of the whole array: call it with the record, not with a rank's or a micro-batch's part.
    """
    result = np.zeros(mask.shape, np.float64)
    trained = values[mask]  # one dimension, in row order: the sums do not see the padding
    if trained.size:
        result[mask] = (trained - trained.mean()) / (trained.std() + EPSILON)
    return result
