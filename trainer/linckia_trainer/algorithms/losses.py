"""The losses, in torch: pure functions of tensors [rows, T] of one micro-batch.

Every loss is a sum over trained tokens divided by ``denominator``: the trained tokens of the whole mini-batch, over all
micro-batches and all ranks. So the losses of the parts add up to the loss of the mini-batch, and neither micro-batching
nor the number of ranks changes anything but rounding. (A backend that averages gradients over ranks or accumulation
steps needs the loss times their number.) Rows with an all-zero mask are padding and add nothing; a denominator of 0
gives a loss of 0.

Each returns (loss, metrics): a scalar that has a gradient, and sums over trained tokens without one. Add the sums up
over parts, then divide by the number of trained tokens. Whatever stands outside the mask, NaN included, reaches neither
loss nor gradient.
"""

import torch
from torch import Tensor

from linckia_trainer.algorithms import kl

Loss = tuple[Tensor, dict[str, Tensor]]


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: float, denominator: float
) -> Loss:
    """The clipped surrogate, with its sign turned: Schulman et al., "Proximal Policy Optimization" (2017), eq. 7.

    -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A), ratio = exp(log_probs - old_log_probs).
    Metrics: ``clip_fraction`` (tokens where the clipped term is the smaller one, so that their gradient is 0) and
    ``approx_kl`` (k3 estimate of KL(old || new), nats).
    """
    new, old = _trained(log_probs, mask), _trained(old_log_probs, mask)
    advantages = _trained(advantages, mask)
    ratio = torch.exp(new - old)
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantages
    loss = -torch.minimum(surrogate, clipped).sum() / _at_least_one(denominator)
    return loss, {
        "clip_fraction": (clipped < surrogate).sum().float(),
        "approx_kl": kl.k3(old, new).detach().sum(),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float | None, denominator: float
) -> Loss:
    """Half the squared error, max'ed with that of values clipped to old_values +- value_clip (none: unclipped).

    The clipping is that of PPO's published implementation (OpenAI baselines, ppo2), the factor 1/2 included.
    Metrics: ``value_clip_fraction`` (tokens where the clipped error is the larger one) and ``value_error`` (squared,
    unclipped).
    """
    values, old_values, returns = _trained(values, mask), _trained(old_values, mask), _trained(returns, mask)
    error = (values - returns) ** 2
    worst = error
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        worst = torch.maximum(error, (near - returns) ** 2)
    loss = worst.sum() / 2 / _at_least_one(denominator)
    return loss, {
        "value_clip_fraction": (worst > error).sum().float(),
        "value_error": error.detach().sum(),
    }


def kl_loss(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, estimator: kl.Estimator, denominator: float
) -> Loss:
    """The estimate of KL(policy || reference), nats; the caller multiplies by the coefficient.

    Shao et al., "DeepSeekMath" (2024), eq. 4, is this with k3. Metric: ``kl`` (the same estimate).
    """
    estimates = kl.estimate(estimator, _trained(log_probs, mask), _trained(reference_log_probs, mask))
    total = estimates.sum()
    return total / _at_least_one(denominator), {"kl": total.detach()}


def entropy_loss(entropies: Tensor, mask: Tensor, denominator: float) -> Loss:
    """Minus the entropy of each trained token's distribution (nats): the caller multiplies by the bonus's weight.

    Schulman et al. (2017), eq. 9. Metric: ``entropy``.
    """
    total = _trained(entropies, mask).sum()
    return -total / _at_least_one(denominator), {"entropy": total.detach()}


def _trained(values: Tensor, mask: Tensor) -> Tensor:
    """float32, with zeros outside the mask, before anything non-linear can make an inf of what stands there."""
    return torch.where(mask.bool(), values.float(), 0.0)


def _at_least_one(denominator: float) -> float:
    return max(float(denominator), 1.0)
