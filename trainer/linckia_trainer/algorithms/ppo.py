"""PPO: advantages and returns from a critic, by GAE. Schulman et al., "Proximal Policy Optimization" (2017)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import Algorithm as AlgorithmConfig
from linckia_trainer.algorithms import gae
from linckia_trainer.algorithms.masks import Batch, trained_tokens


def advantages(batch: Batch, token_rewards: NDArray[np.float32], config: AlgorithmConfig) -> dict[str, NDArray[Any]]:
    """``advantages`` and ``returns``, float32 [N, T], 0 outside the loss mask. Needs ``values`` in the batch.

    Returns are those before whitening: the critic learns rewards in their own unit.
    """
    mask = trained_tokens(batch)
    raw, returns = gae.advantages_and_returns(token_rewards, batch["values"], mask, config.gamma, config.lam)
    result = gae.whiten(raw, mask) if config.normalize_advantages else raw
    return {"advantages": result.astype(np.float32), "returns": returns.astype(np.float32)}
