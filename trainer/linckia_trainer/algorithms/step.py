"""What the controller asks of an algorithm around a record: pure functions, so that replay gives what training had."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia_trainer.algorithms import advantages_of, kl
from linckia_trainer.algorithms.masks import Batch, trained_tokens
from linckia_trainer.algorithms.rewards import Normalizer, clip_rewards, token_rewards


def prepare(batch: Batch, header: Mapping[str, Any], config: RunConfig) -> dict[str, NDArray[Any]]:
    """The record's arrays plus ``advantages`` (and ``returns``, with a critic), float32 [N, T]: what the update needs.

    A pure function of the record and the config. Of the header it reads ``kl_coefficient`` and ``normalizer``, the
    values before the step: ``{"kl_coefficient": 0.05, "normalizer": {"count": 0, "mean": 0.0, "m2": 0.0}}``.
    """
    algorithm = config.algorithm
    shaped = shape_rewards(batch["rewards"], Normalizer(**header["normalizer"]), config)
    rewards = token_rewards(batch, shaped, header["kl_coefficient"], algorithm.kl.estimator, algorithm.kl.where)
    return {**batch, **advantages_of(algorithm.name)(batch, rewards, algorithm)}


def after_step(
    batch: Batch, kl_coefficient: float, normalizer: Normalizer, config: RunConfig
) -> tuple[float, Normalizer]:
    """(KL coefficient, normaliser) as they are after this step: what the next step starts from.

    A fixed coefficient, and a normaliser that the config does not use, stay as they are.
    """
    if config.reward.normalize:
        normalizer = normalizer.update(clip_rewards(batch["rewards"], config.reward.clip))
    penalty = config.algorithm.kl
    if penalty.target is not None:
        kl_coefficient = kl.adapt_coefficient(
            kl_coefficient, observed_kl(batch), penalty.target, penalty.horizon, len(batch["rewards"])
        )
    return kl_coefficient, normalizer


def shape_rewards(rewards: NDArray[Any], normalizer: Normalizer, config: RunConfig) -> NDArray[np.float32]:
    """Raw ``rewards`` [N] clipped, then normalised by the state that includes them.

    ``normalizer`` is the state before the step.
    """
    clipped = clip_rewards(rewards, config.reward.clip)
    return normalizer.update(clipped).apply(clipped) if config.reward.normalize else clipped


def observed_kl(batch: Batch) -> float:
    """Mean k1 estimate of KL(old policy || reference) over trained tokens, nats per token; NaN if there are none."""
    mask = trained_tokens(batch)
    if not mask.any():
        return float("nan")
    old, reference = batch["old_log_probs"][mask], batch["reference_log_probs"][mask]
    return float(kl.k1(old.astype(np.float64), reference.astype(np.float64)).mean())
