"""The second base class: a member that holds a model and, for policy and critic, folds the log into it."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia_trainer.groups.member import Identity, Member
from linckia_trainer.groups.saver import Saver
from linckia_trainer.state.choose import Choice
from linckia_trainer.state.tiers import StateRef

Arrays = Mapping[str, NDArray[Any]]


class ModelMember(Member):
    """Load, offload, reload; and for a stateful role: apply a record, save, restore.

    A stateful role provides ``self.engine`` (DeepSpeed) and ``update(arrays, step) -> metrics``. Its state is the pure
    fold of the log up to ``applied_step``; ``dirty`` is true from before the first optimizer step of a record until
    ``applied_step`` has grown, and a dirty state is never saved.
    """

    def __init__(self, identity: Identity, device: str, threads: int, orphan_timeout: float) -> None:
        super().__init__(identity, device, threads, orphan_timeout)
        self.config: RunConfig | None = None
        self.engine: Any = None
        self.saver: Saver | None = None
        self.applied_step = 0
        self.log_hash = ""
        self.dirty = False
        self.last_metrics: dict[str, float] = {}

    def prepare(self, config: RunConfig) -> None:
        import deepspeed  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

    def load(self, config: RunConfig) -> None:
        """Build the model as state 0 has it."""
        raise NotImplementedError

    def update(self, arrays: Arrays, step: int, kl_coefficient: float) -> dict[str, float]:
        """Train on one record's rows of this rank; returns metrics, the same on every rank."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        saving = self.saver.describe() if self.saver else {}
        return {"applied_step": self.applied_step, "log_hash": self.log_hash, "dirty": self.dirty, **saving}

    def offload_optimizer(self) -> None:
        """Move optimizer states, master weights and gradients out of device memory; the weights stay for the sync."""
        if self.engine is not None and self.device == "cuda":
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

            self.engine.offload_states(include=[State.optim_states, State.hp_params, State.lp_grads])

    def offload(self) -> None:
        """Move all that training needs out of device memory (engines share the device)."""
        if self.engine is not None and self.device == "cuda":
            self.engine.offload_states()

    def reload(self) -> None:
        if self.engine is not None and self.device == "cuda":
            self.engine.reload_states()

    def begin(self, config: RunConfig, origin: str) -> None:
        """Become stateful: state 0 of the log that starts at ``origin`` = log_hash(0)."""
        self.saver = Saver(self.identity, config)
        self.applied_step, self.log_hash, self.dirty = 0, origin, False

    def apply_record(
        self, arrays: Arrays | None, step: int, previous: str, log_hash: str, kl_coefficient: float = 0.0
    ) -> dict[str, float]:
        """Fold record ``step`` in; ``arrays`` is None for a step that is skipped. Applying it again changes nothing."""
        if self.applied_step == step and self.log_hash == log_hash and not self.dirty:
            return self.last_metrics
        assert not self.dirty, f"{self.identity.name} is dirty at step {self.applied_step}"
        assert (step, previous) == (self.applied_step + 1, self.log_hash), (
            f"{self.identity.name} stands at step {self.applied_step} {self.log_hash}, not before {step} {previous}"
        )
        metrics: dict[str, float] = {}
        if arrays is not None:
            self.dirty = True
            metrics = self.update(arrays, step, kl_coefficient)
        self.applied_step, self.log_hash, self.dirty, self.last_metrics = step, log_hash, False, metrics
        return metrics

    def save(self, tiers: list[str], keep: list[int], wait: bool = False) -> dict[str, Any]:
        """Copy the state out and write it behind to ``tiers``; returns those skipped as still busy, and what is written.

        ``keep``: steps of complete older states; this rank's node-memory states of other steps are deleted.
        """
        assert self.saver is not None
        assert not self.dirty
        self.progress.tick("save", 0)
        skipped = self.saver.save(self.engine, self.applied_step, self.log_hash, tiers, keep, wait)
        return {"skipped": skipped, "written": dict(self.saver.written)}

    def saved_states(self) -> list[StateRef]:
        """The states of this rank in its own node's memory."""
        assert self.saver is not None
        return self.saver.node_states()

    def node_memory_needs(self) -> tuple[str, int, int]:
        """(node, bytes this rank's states will take in its memory, bytes free there)."""
        assert self.saver is not None
        return self.saver.node_memory_needs(self.engine)

    def finish_saving(self, timeout: float) -> bool:
        """Wait until nothing is being written. False: still busy after ``timeout`` seconds."""
        assert self.saver is not None
        return self.saver.drain(timeout)

    def release_node_memory(self) -> None:
        """Delete this rank's states in its node's memory: the run is finished."""
        assert self.saver is not None
        self.saver.release_node_memory()

    def restore(self, choice: Choice) -> None:
        """Load a chosen state. Raises DamagedError if its bytes are not what was written."""
        assert self.saver is not None
        with self.saver.extracted(choice.refs[self.identity.rank]) as folder:
            self.progress.tick("restore")
            if folder is None:
                return
            self.load_state(folder)
        self.applied_step, self.log_hash, self.dirty, self.last_metrics = choice.step, choice.log_hash, False, {}

    def load_state(self, folder: Path) -> None:
        from linckia_trainer.groups.engine import load_checkpoint

        load_checkpoint(self.engine, folder)

    def state_hash(self) -> str:
        """sha256 over this rank's parameters and optimizer state, bit for bit."""
        from linckia_trainer.groups.engine import state_tensors

        digest = hashlib.sha256()
        for name, tensor in state_tensors(self.engine):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(dtype=_bytes()).numpy().data)
        return digest.hexdigest()


def micro_batches(arrays: Arrays, size: int) -> Iterator[tuple[slice, dict[str, NDArray[Any]]]]:
    """Consecutive rows, ``size`` at a time, each trimmed to its own longest sequence."""
    rows = len(arrays["lengths"])
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        width = int(arrays["lengths"][part].max())
        yield (
            part,
            {
                key: np.ascontiguousarray(
                    value[part, :width] if value.ndim == 2 and key != "reward_parts" else value[part]
                )
                for key, value in arrays.items()
            },
        )


def _bytes() -> Any:
    import torch

    return torch.uint8
