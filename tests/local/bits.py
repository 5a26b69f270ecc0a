"""What a run left, read back bit for bit: how two runs are compared."""

import hashlib
import io
from pathlib import Path

import torch

from linckia_trainer.groups.engine import named_tensors
from linckia_trainer.log import framing
from linckia_trainer.log.chain import RunLog, record_key
from linckia_trainer.log.store import Store
from linckia_trainer.state.format import read_state
from linckia_trainer.state.tiers import RUN_DIRECTORY, Tier, list_states


def run_store(place: Path) -> Store:
    """The run directory of the run that is named like the folder it was started in."""
    return Store(str(place / "runs" / place.name))


def payload_hashes(place: Path) -> list[str]:
    """sha256 of each record's payload, in step order."""
    store = run_store(place)
    steps = RunLog(store, None).steps()
    return [hashlib.sha256(framing.unpack(store.get(record_key(step)))[1]).hexdigest() for step in steps]


def log_hashes(place: Path) -> list[str]:
    log = RunLog(run_store(place), None)
    return [log.log_hash(step) for step in log.steps()]


def state_hashes(place: Path, group: str, step: int) -> dict[int, str]:
    """rank -> sha256 over parameters and optimizer state of the state saved after ``step``."""
    store = run_store(place)
    found = {}
    for ref in list_states([Tier(RUN_DIRECTORY, store)], group):
        if ref.step == step:
            digest = hashlib.sha256()
            for name, content in read_state(store, ref.key)[1]:
                for key, tensor in named_tensors(name, torch.load(io.BytesIO(content), weights_only=False)):
                    digest.update(key.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            found[ref.rank] = digest.hexdigest()
    return found


def trajectory_keys(place: Path) -> list[tuple[int, int]]:
    """(position, sample) of every recorded trajectory, in log order."""
    log = RunLog(run_store(place), None)
    return [
        (int(position), int(sample))
        for step in log.steps()
        for position, sample in zip(log.read(step).arrays["positions"], log.read(step).arrays["samples"], strict=True)
    ]
