"""How a record becomes an update.

- ``step.py``: the two functions the controller calls around a record
- ``rewards.py``: raw rewards clipped, normalised, and spread over tokens with the KL penalty; ``kl.py``: its estimators
- ``ppo.py`` (with ``gae.py``), ``grpo.py``: one algorithm each, from token rewards to advantages
- ``losses.py``: the losses the members minimise; the only module here that imports torch
- ``masks.py``: sums over trained tokens that do not depend on padding

Adding an algorithm: one file with an ``advantages`` function, one line in ``linckia.api.algorithms.ALGORITHMS``.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.algorithms import ALGORITHMS
from linckia.api.config import Algorithm as AlgorithmConfig
from linckia_trainer.algorithms.masks import Batch

# ``advantages(batch, token_rewards, config)`` is pure: the record's arrays and float32 [N, T] token rewards to
# ``{"advantages": float32 [N, T]}``, with ``"returns"`` beside it where a critic learns.
Advantages = Callable[[Batch, NDArray[np.float32], AlgorithmConfig], dict[str, NDArray[Any]]]


def advantages_of(name: str) -> Advantages:
    """The algorithm's own function."""
    found: Advantages = import_module(ALGORITHMS[name].module).advantages
    return found
