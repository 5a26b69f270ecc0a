"""One sampled answer, as it travels from an engine to the controller and into the spool."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SampleRequest:
    """One answer to sample. ``seed`` comes from (run seed, position, sample) alone.

    Example: ``SampleRequest(position=17, sample=0, prompt_tokens=[5, 9], seed=123)``
    """

    position: int
    sample: int
    prompt_tokens: list[int]
    seed: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Trajectory:
    """A finished answer. Immutable; its key (position, sample) names it for the whole run.

    ``answer_tokens`` int32 [n] with the end token where the answer ended by itself; ``log_probs`` float32 [n], nats,
    by the engine at the sampling temperature; ``finish`` is ``stop`` or ``length``; ``weight_step`` and ``policy_generation`` are
    the weight version that sampled it.
    """

    position: int
    sample: int
    prompt_tokens: NDArray[np.int32]
    answer_tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish: str
    weight_step: int
    policy_generation: int = field(compare=False)

    @property
    def key(self) -> tuple[int, int]:
        return (self.position, self.sample)
