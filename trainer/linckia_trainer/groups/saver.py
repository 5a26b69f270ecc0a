"""States out of a member: copied before the next optimizer step, written behind, one at a time per tier."""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from linckia.api.config import RunConfig
from linckia_trainer.groups.engine import CHECKPOINT_TAG, copy_out
from linckia_trainer.groups.member import Identity
from linckia_trainer.log.framing import Buffer
from linckia_trainer.log.patience import RUN_SECONDS, Patience
from linckia_trainer.log.store import Store
from linckia_trainer.state import format as state_format
from linckia_trainer.state.format import StateHeader
from linckia_trainer.state.tiers import NODE_MEMORY, RUN_DIRECTORY, StateRef, Tier, list_states, node_memory


class Saver:
    """Writes one rank's states to its tiers and reads them back."""

    def __init__(self, identity: Identity, config: RunConfig) -> None:
        storage = config.storage
        self.identity = identity
        run_directory = Store(config.run.dir, storage.options, storage.single_writer)
        patience = Patience(RUN_SECONDS, self._note_problem)
        self.tiers = {RUN_DIRECTORY: Tier(RUN_DIRECTORY, run_directory.patient(patience))}
        if storage.node_memory is not None:
            self.tiers = {NODE_MEMORY: node_memory(config), **self.tiers}
            self.tiers[NODE_MEMORY].store.sweep()  # half a state of a killed member would take memory until a reboot
        self.keep = storage.node_memory.keep if storage.node_memory else 0
        self.pool = ThreadPoolExecutor(max_workers=len(self.tiers) + 1, thread_name_prefix="save")
        self.jobs: dict[str, Future[None]] = {}
        self.spare: dict[str, Any] = {}  # an older copy of the state that is written; its memory is the next one's
        self.written: dict[str, int] = {}
        self.problem = ""

    def save(
        self, engine: Any, step: int, log_hash: str, tiers: list[str], keep: list[int], wait_written: bool
    ) -> list[str]:
        """Copy the state of ``engine`` and write it behind. Collective; every rank skips the same tiers.

        Returns the tiers that were skipped because an older state is still being written to them on some rank.
        """
        skipped = self._busy_anywhere(tiers)
        free = [tier for tier in tiers if tier not in skipped]
        if free:
            identity = self.identity
            header = StateHeader(
                identity.run, identity.group, step, identity.rank, identity.world_size, log_hash, identity.attempt,
                identity.generation,
            )  # fmt: skip
            spare, self.spare = self.spare, {}
            content = self.pool.submit(self._serialise, header, copy_out(engine, spare))
            for tier in free:
                self.jobs[tier] = self.pool.submit(self._write, self.tiers[tier], header, content, keep)
        if wait_written:
            for tier in free:
                self.jobs[tier].result()
        return skipped

    def node_memory_needs(self, engine: Any) -> tuple[str, int, int]:
        """(node, bytes that this rank's states will take in its memory, bytes free there)."""
        folder = Path(self.tiers[NODE_MEMORY].store.uri)
        while not folder.exists():
            folder = folder.parent
        parameters = sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters())
        shards = self.identity.world_size if engine.zero_optimization_stage() else 1
        # Two moments and a master copy in fp32, and the module's own copy, which only ZeRO-3 splits.
        module = parameters * 4 // (self.identity.world_size if engine.zero_optimization_stage() == 3 else 1)
        one_state = parameters * 12 // shards + module
        return ray.get_runtime_context().get_node_id(), one_state * (self.keep + 1), shutil.disk_usage(folder).free

    def drain(self, timeout: float) -> bool:
        return not wait(self.jobs.values(), timeout=timeout).not_done

    def describe(self) -> dict[str, Any]:
        """For ``status``: the newest step written to each tier, and the last thing that went wrong."""
        return {"saved": dict(self.written), "saving_problem": self.problem}

    def node_states(self) -> list[StateRef]:
        if NODE_MEMORY not in self.tiers:
            return []
        states = list_states([self.tiers[NODE_MEMORY]], self.identity.group, self.identity.run)
        return [state for state in states if state.rank == self.identity.rank]

    @contextlib.contextmanager
    def extracted(self, ref: StateRef) -> Iterator[Path | None]:
        """The checkpoint files of a state in a folder that DeepSpeed can load; every byte checked first. Collective.

        Loading is one collective too: if a rank cannot read its state it raises, and the others get None, load nothing and
        say nothing, so that the group's error is that rank's.
        """
        shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(prefix="linckia-restore-", dir=shared_memory) as folder:
            problem: Exception | None = None
            try:
                _, files = state_format.read_state(self.tiers[ref.tier].store, ref.key)
                target = Path(folder, CHECKPOINT_TAG)
                target.mkdir()
                state_format.extract(files, target)
            except Exception as error:  # noqa: BLE001 - raised below, once the others know of it
                problem = error
            [anywhere] = _true_anywhere([problem is not None])
            if problem is not None:
                raise problem
            yield None if anywhere else Path(folder)

    def release_node_memory(self) -> None:
        for state in self.node_states():
            self.tiers[NODE_MEMORY].store.delete(state.key)

    def _busy_anywhere(self, tiers: list[str]) -> list[str]:
        busy = _true_anywhere([tier in self.jobs and not self.jobs[tier].done() for tier in tiers])
        return [tier for tier, flag in zip(tiers, busy, strict=True) if flag]

    def _serialise(self, header: StateHeader, states: dict[str, Any]) -> list[Buffer]:
        content = serialise(header, states)
        self.spare = states
        return content

    def _write(self, tier: Tier, header: StateHeader, content: "Future[list[Buffer]]", keep: list[int]) -> None:
        try:
            tier.store.put(header.key, content.result())
        except Exception as error:
            # Behind the training: whatever a storage raises is reported and the run trains on with its older states.
            self._note_problem(f"state {header.key} was not written to {tier.name}: {error}")
            raise
        self.written[tier.name] = header.step
        if tier.name == NODE_MEMORY:
            self._prune_node_memory({*keep, header.step})

    def _note_problem(self, text: str) -> None:
        self.problem = text

    def _prune_node_memory(self, keep: set[int]) -> None:
        for state in self.node_states():
            if state.step not in keep and state.step < max(keep):
                self.tiers[NODE_MEMORY].store.delete(state.key)


def _true_anywhere(flags: list[bool]) -> list[bool]:
    """Each flag: whether it is true on any rank. Collective."""
    if dist.get_world_size() == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.float32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [flag > 0 for flag in found.tolist()]


def serialise(header: StateHeader, states: dict[str, Any]) -> list[Buffer]:
    """The state as the object that every tier takes, its files as torch.save writes them; hashed once."""
    files = []
    for name, state in sorted(states.items()):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        files.append((name, buffer.getbuffer()))
    return state_format.state_object(header, files)
