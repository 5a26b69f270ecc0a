"""From the raw reward of an answer to the reward of each of its tokens: clip, normalise, add the KL penalty."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from linckia_trainer.algorithms import kl
from linckia_trainer.algorithms.masks import Batch, last_trained, trained_tokens

EPSILON = 1e-8


@dataclass(frozen=True)
class Normalizer:
    """Running count, mean and sum of squared differences (m2) of rewards so far. Immutable: ``update`` makes another.

    A step's rewards are normalised by the state that includes them: the record's ``normalizer`` is the state before the
    step, ``normalizer_after`` is ``normalizer.update(rewards)``, and that one is applied. So the first step is
    normalised too, and a skipped step leaves no trace (the state before it goes on).

    Example: ``Normalizer().update(np.array([1.0, 3.0])) == Normalizer(count=2, mean=2.0, m2=2.0)``;
    ``dataclasses.asdict`` and ``Normalizer(**header["normalizer"])`` take it into a record's header and back.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, rewards: NDArray[Any]) -> "Normalizer":
        """The state that has seen ``rewards`` [N] too. Chan, Golub and LeVeque (1979), the parallel variance update."""
        if rewards.size == 0:
            return self
        rewards = rewards.astype(np.float64)
        mean = float(rewards.mean())
        m2 = float(((rewards - mean) ** 2).sum())
        count = self.count + rewards.size
        delta = mean - self.mean
        return Normalizer(
            count=count,
            mean=self.mean + delta * rewards.size / count,
            m2=self.m2 + m2 + delta**2 * self.count * rewards.size / count,
        )

    def apply(self, rewards: NDArray[Any]) -> NDArray[np.float32]:
        """``rewards`` [N] less the mean, by the (population) standard deviation; unchanged if nothing was seen."""
        if self.count == 0:
            return rewards.astype(np.float32)
        deviation = (self.m2 / self.count) ** 0.5
        normalized: NDArray[np.float64] = (rewards.astype(np.float64) - self.mean) / (deviation + EPSILON)
        return normalized.astype(np.float32)


def clip_rewards(rewards: NDArray[Any], clip: float | None) -> NDArray[np.float32]:
    """``rewards`` [N] within [-clip, clip]; none: as they are. It comes first, to bound what the normaliser sees."""
    limited = rewards if clip is None else np.clip(rewards.astype(np.float64), -clip, clip)
    return limited.astype(np.float32)


def token_rewards(
    batch: Batch,
    shaped_rewards: NDArray[Any],
    kl_coefficient: float,
    estimator: kl.Estimator,
    where: Literal["reward", "loss"],
) -> NDArray[np.float32]:
    """Rewards of the tokens, float32 [N, T], 0 outside the loss mask: Ziegler et al. (2019), eq. 2, token by token.

    Each row's scalar from ``shaped_rewards`` [N] sits at its last trained token (its last token, unless the answer ends
    in tokens that are not trained on). With ``where == "reward"`` every trained token pays ``kl_coefficient`` times the
    estimate of KL(old policy || reference), which needs ``reference_log_probs`` in the batch unless the coefficient
    is 0. A row without a trained token has no reward at all.
    """
    mask = trained_tokens(batch)
    result = np.zeros(mask.shape, np.float64)
    if where == "reward" and kl_coefficient > 0:
        old, reference = batch["old_log_probs"][mask], batch["reference_log_probs"][mask]
        result[mask] = -kl_coefficient * kl.estimate(estimator, old.astype(np.float64), reference.astype(np.float64))
    rows, columns = last_trained(mask)
    result[rows, columns] += shaped_rewards[rows]
    return result.astype(np.float32)
