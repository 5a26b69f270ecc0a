"""The order in which engines and trainer hand one set of GPUs to each other (colocation ``all``).

Each moment holds as little as it can: the optimizer leaves before the engines' weights come back, the trainer's own copies
leave before the KV cache comes back, and the engines are asleep before training returns. Weights and KV cache wake apart
because together they would need room for both while the trainer's copies are still there.
"""

from collections.abc import Callable, Sequence

from linckia_trainer.groups.group import ActorGroup

DISCARD_WEIGHTS = 2  # vLLM's sleep level that keeps no copy: the next sync brings new weights anyway


def to_engines(trained: Sequence[ActorGroup], engines: Sequence[ActorGroup], sync: Callable[[], None]) -> None:
    """From training to generation, with the weight sync in the middle."""
    on_all(trained, "offload_optimizer")
    on_all(engines, "wake", ["weights"])
    sync()
    on_all(trained, "offload")
    on_all(engines, "wake", ["kv_cache"])


def to_training(trained: Sequence[ActorGroup], engines: Sequence[ActorGroup]) -> None:
    """From generation back to training."""
    on_all(engines, "sleep", DISCARD_WEIGHTS)
    on_all(trained, "reload")


def on_all(groups: Sequence[ActorGroup], method: str, *arguments: object) -> None:
    """One method of several groups at once."""
    for call in [group.start(method, *arguments) for group in groups]:
        call.results()
