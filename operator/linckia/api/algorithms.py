"""The algorithms there are, and what control and data plane both have to know of them. A new one is a file and a line here.

The file is named, not imported: a module with ``advantages`` (see ``linckia_trainer.algorithms``).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """``module`` holds its ``advantages``; ``needs_critic``: a critic group is started and trained."""

    module: str
    needs_critic: bool
    min_samples_per_prompt: int = 1


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm("linckia_trainer.algorithms.ppo", needs_critic=True),
    "grpo": Algorithm("linckia_trainer.algorithms.grpo", needs_critic=False, min_samples_per_prompt=2),
}
