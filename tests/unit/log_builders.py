"""Small runs to test the log and the states with: records, states, stores."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.framing import Buffer
from linckia_trainer.log.records import RecordHeader, encode
from linckia_trainer.log.store import Store
from linckia_trainer.state.format import StateHeader, write_state
from linckia_trainer.state.tiers import StateRef

ORIGIN = "0" * 64
EMPTY = {"count": 0, "mean": 0.0, "m2": 0.0}


def header(step: int) -> RecordHeader:
    return RecordHeader(
        step=step,
        epoch=0,
        cursor_before=4 * (step - 1),
        cursor_after=4 * step,
        kl_coefficient=0.1,
        kl_coefficient_after=0.1 + step,
        normalizer=EMPTY,
        normalizer_after={"count": 4 * step, "mean": 0.5, "m2": 1.0},
        reward_part_names=("exact", "format"),
    )


def payload(step: int, variant: int = 0) -> bytes:
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4) + 100 * step + variant
    return encode(header(step), {"tokens": tokens, "rewards": np.ones(3, np.float32)})


def make_log(store: Store, steps: int, origin: str | None = ORIGIN) -> RunLog:
    log = RunLog(store, origin)
    for step in range(1, steps + 1):
        log.commit(step, payload(step), attempt=1)
    return log


def save_state(
    store: Store, log: RunLog, group: str, step: int, world: int = 1, ranks: Any = None, **changes: Any
) -> list[str]:
    """A state of a group as its members would save it; returns the keys."""
    keys = []
    for rank in range(world) if ranks is None else ranks:
        fields: dict[str, Any] = {
            "run": "first", "group": group, "step": step, "rank": rank, "world": world,
            "log_hash": log.log_hash(step), "attempt": 1, "generation": 1,
        }  # fmt: skip
        state = StateHeader(**{**fields, **changes})
        keys.append(write_state(store, state, [("model.pt", f"{group} {step} {rank}".encode() * 50)]))
    return keys


def hash_at(step: int) -> str | None:
    """The chain of the refs below: it knows steps 0 to 9."""
    return f"hash-{step}" if step <= 9 else None


def ref(step: int, rank: int = 0, world: int = 1, **changes: Any) -> StateRef:
    """One rank's state of step ``step``, valid unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "group": "policy", "step": step, "attempt": 1, "generation": 1, "rank": rank, "world": world,
        "log_hash": f"hash-{step}", "tier": "run_directory", "key": f"{step}/{rank}", "size": 1, "modified": 0.0,
    }  # fmt: skip
    return StateRef(**{**fields, **changes})


def both(step: int, **changes: Any) -> list[StateRef]:
    """The states of both ranks of a group of two."""
    return [ref(step, rank, 2, **changes) for rank in (0, 1)]


def flip(store: Store, key: str, byte: int) -> None:
    """Change one bit of a stored object."""
    data = bytearray(store.get(key))
    data[byte] ^= 1
    store.put(key, bytes(data))


def local_store(folder: Path) -> Store:
    return Store(str(folder / "run"))


class CountingStore(Store):
    """A store that says how often and how much it was asked for."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.calls: dict[str, int] = {}
        self.bytes_read = 0

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def scan(self, prefix: str = "") -> Any:
        self.count("scan")
        return super().scan(prefix)

    def get(self, key: str) -> bytes:
        self.count("get")
        data = super().get(key)
        self.bytes_read += len(data)
        return data

    def read_starts(self, keys: Any, num_bytes: int) -> Any:
        self.count("read_starts")
        starts = super().read_starts(keys, num_bytes)
        self.bytes_read += sum(len(start) for start in starts if start)
        return starts

    def info(self, key: str) -> tuple[int, float]:
        self.count("info")
        return super().info(key)


class MemoryPlace(MemoryFileSystem):
    """An object store in memory. fsspec's own looks before it creates, which threads can interleave."""

    protocol = "place"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    one_at_a_time = threading.Lock()

    def pipe_file(self, path: str, value: Buffer, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.one_at_a_time:
            super().pipe_file(path, value, mode=mode, **kwargs)


class TwiceFileSystem(MemoryFileSystem):
    """Lets a key be created twice, as stores without put-if-absent do."""

    protocol = "twice"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: Buffer, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **kwargs)
