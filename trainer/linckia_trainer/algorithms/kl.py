"""Estimators of KL(policy || reference) from tokens the policy sampled, and the coefficient that weighs the penalty.

All three estimators are those of J. Schulman, "Approximating KL Divergence" (2020), with r = p_reference / p_policy.
They are written with operators that numpy arrays and torch tensors share, so that the reward (numpy, in the controller)
and the loss (torch, in the members) use the same lines.
"""

import math
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]
Array = TypeVar("Array", NDArray[np.float64], "torch.Tensor")


def k1(log_probs: Array, reference_log_probs: Array) -> Array:
    """-log r, in nats per token: unbiased, of high variance, negative for some tokens.

    In a loss its gradient is zero in expectation (the score function's mean), so there it penalises nothing.
    """
    return log_probs - reference_log_probs


def k2(log_probs: Array, reference_log_probs: Array) -> Array:
    """(log r)^2 / 2, in nats per token: biased, of low variance, never negative. Its gradient is that of the KL."""
    return (log_probs - reference_log_probs) ** 2 / 2


def k3(log_probs: Array, reference_log_probs: Array) -> Array:
    """(r - 1) - log r, in nats per token: unbiased, of low variance, never negative."""
    log_r = reference_log_probs - log_probs
    # expm1: near the reference exp(log_r) - 1 loses all digits in float32.
    r_minus_1 = np.expm1(log_r) if isinstance(log_r, np.ndarray) else log_r.expm1()
    return r_minus_1 - log_r


def estimate(estimator: Estimator, log_probs: Array, reference_log_probs: Array) -> Array:
    """The named estimator, elementwise: two arrays of one shape, in nats, to one of that shape."""
    if estimator == "k1":
        return k1(log_probs, reference_log_probs)
    if estimator == "k2":
        return k2(log_probs, reference_log_probs)
    return k3(log_probs, reference_log_probs)


def adapt_coefficient(coefficient: float, observed_kl: float, target: float, horizon: int, num_samples: int) -> float:
    """The coefficient after a step that saw ``num_samples`` samples with a mean of ``observed_kl`` nats per token.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2:
    e = clip(observed / target - 1, -0.2, 0.2), then coefficient * (1 + K e), with K = num_samples / horizon as in the
    authors' code. K is at most 1 here: a larger one could turn the coefficient negative. A coefficient of 0 stays 0.
    """
    if math.isnan(observed_kl):
        return coefficient  # such a step is never trained on: the ranks find its loss not finite
    error = max(-0.2, min(0.2, observed_kl / target - 1))
    return coefficient * (1 + error * min(1.0, num_samples / horizon))
