"""The places states are kept, and what is in them by the headers alone."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from linckia.api.config import RunConfig
from linckia.api.errors import DamagedError
from linckia_trainer.log import framing
from linckia_trainer.log.store import Store
from linckia_trainer.state.format import header_of, parse_key, read_payload

NODE_MEMORY = "node_memory"
RUN_DIRECTORY = "run_directory"


@dataclass(frozen=True)
class Tier:
    """A place where states are kept, fastest first in a list of tiers."""

    name: str
    store: Store


def node_memory_folder(config: RunConfig) -> Path:
    """Where this host's memory keeps a run's states: by name, and by place, for two runs may have one name.

    ``config.run.dir`` is absolute. Example: ``/dev/shm/linckia/sort-seed1-3f2a9c01``
    """
    place = config.run.dir.removeprefix("file://").rstrip("/")
    return Path(config.storage.node_memory_dir, f"{config.run.name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}")


def node_memory(config: RunConfig) -> Tier:
    """The node memory tier of this host."""
    return Tier(NODE_MEMORY, Store(str(node_memory_folder(config))))


@dataclass(frozen=True)
class StateRef:
    """One rank's state in one tier. ``invalid`` says why it cannot be restored; None: nothing speaks against it so far.

    ``modified`` is in seconds since 1970. Damaged: ``world`` is 0 and ``log_hash`` empty, the rest comes from the key.
    """

    group: str
    step: int
    attempt: int
    generation: int
    rank: int
    world: int
    log_hash: str
    tier: str
    key: str
    size: int
    modified: float
    invalid: str | None = None


def list_states(tiers: Iterable[Tier], group: str, run: str | None = None) -> list[StateRef]:
    """All states of a group in all tiers, reading headers only; in the order of the tiers, then of the keys.

    A damaged or cut-off one, or one of another ``run``, is listed as invalid with the reason.
    """
    return [ref for tier in tiers for ref in _list_tier(tier, group, run)]


def verify_state(tiers: Sequence[Tier], ref: StateRef) -> str | None:
    """Read a state whole; the reason if it is not what was written, else None."""
    store = next(tier.store for tier in tiers if tier.name == ref.tier)
    try:
        read_payload(store, ref.key)
    except DamagedError as error:
        return error.reason
    except FileNotFoundError:
        return "it is gone"
    return None


def _list_tier(tier: Tier, group: str, run: str | None) -> list[StateRef]:
    found = {key: info for key, info in tier.store.scan(f"state/{group}").items() if parse_key(key)}
    starts = tier.store.read_starts(list(found), framing.FIRST_READ_BYTES)
    refs = []
    for (key, info), start in zip(found.items(), starts, strict=True):
        parsed = parse_key(key)
        if start is None or parsed is None:  # deleted since the listing
            continue
        _, step, attempt, generation, rank = parsed
        world, log_hash, invalid = _judge(tier.store, key, start, info.size, run)
        refs.append(
            StateRef(
                group,
                step,
                attempt,
                generation,
                rank,
                world,
                log_hash,
                tier.name,
                key,
                info.size,
                info.modified,
                invalid,
            )
        )
    return refs


def _judge(store: Store, key: str, start: bytes, size: int, run: str | None) -> tuple[int, str, str | None]:
    """(world, log_hash, why it cannot be restored) from a state's beginning."""

    def read(num_bytes: int) -> bytes:
        return start if num_bytes == framing.FIRST_READ_BYTES else store.read_start(key, num_bytes)

    try:
        raw, payload_start = framing.read_header_with(read, key)
        framing.check_size(raw, payload_start, size, key)
        header = header_of(raw, key)
    except DamagedError as error:
        return 0, "", error.reason
    invalid = f"it is a state of run {header.run}" if run is not None and header.run != run else None
    return header.world, header.log_hash, invalid
