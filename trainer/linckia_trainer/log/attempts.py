"""Who may write: attempts of the run's controller and generations of its groups, claimed by exclusive create.

Objects, all JSON: ``attempts/N`` who claimed it, ``attempts/N.sign`` which it writes again and again while it lives,
``attempts/N.end`` how it ended, ``generations/{group}/{n}``.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from linckia.api.errors import LiveRunError
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.process import start_time, this_host
from linckia_trainer.log.store import Store

SIGN_SECONDS = 3.0  # how often a living attempt gives a sign
LOOKS = 8  # how often it is looked for, each time after half of that: a store may take its time

Outcome = Literal["finished", "stopped", "failed"]
_ATTEMPT = re.compile(r"attempts/(\d+)")


@dataclass(frozen=True)
class AttemptInfo:
    """One life of the controller, as it claimed itself. Immutable once claimed.

    (``host``, ``pid``, ``start_time``) names its process (see ``process.start_time``). ``ray_address`` and
    ``api_address`` are where its beacon and its control API are. ``config`` is the resolved run config.

    Example: ``AttemptInfo(attempt=2, host="node-0", pid=4711, start_time=123456, ray_address="10.0.0.1:6379",
    api_address="10.0.0.1:8470", config={...})``
    """

    attempt: int
    host: str = ""
    pid: int = 0
    start_time: int = 0
    ray_address: str = ""
    api_address: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    claimed: float = 0.0


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended. ``fingerprint`` names a cause that is the same when it strikes again.

    ``kind`` of a failure: ``exception`` for what another attempt would raise again, ``death`` for what came from outside.
    """

    attempt: int
    outcome: Outcome
    cause: str
    fingerprint: str
    ended: float
    kind: str = ""


BeaconAlive = Callable[[AttemptInfo], bool]
Sleep = Callable[[float], None]


def claim(
    store: Store,
    info: Mapping[str, Any],
    *,
    takeover: bool = False,
    beacon_alive: BeaconAlive | None = None,
    seen_dead: int = 0,
    sleep: Sleep = time.sleep,
) -> int:
    """Claim the next attempt; returns its number, from 1. ``info``: AttemptInfo's fields but for ``attempt``.

    From that moment a lower attempt is superseded. LiveRunError if the newest attempt is alive, unless ``takeover``. Of
    two that start at once the slower finds the faster one alive. ``seen_dead``: an attempt that ``is_live`` has judged
    already; of it only process and beacon are asked for.
    """
    while True:
        newest = latest(store)
        looks = LOOKS if newest is None or newest.attempt != seen_dead else 0
        if newest is not None and not takeover and is_live(store, newest, beacon_alive, sleep, looks):
            raise LiveRunError(
                "run.dir", store.uri,
                f"attempt {newest.attempt} of this run is alive: process {newest.pid} on {newest.host}",
                "wait for it, stop it with `linckia stop`, or take over with --takeover",
            )  # fmt: skip
        number = 1 if newest is None else newest.attempt + 1
        mine = canonical_json(asdict(AttemptInfo(**{"claimed": time.time(), **info, "attempt": number})))
        key = f"attempts/{number}"
        # a server may have taken our claim and its answer been lost: the client's own second try finds it there
        if store.put_if_absent(key, mine) or store.get(key) == mine:
            return number


def numbers(store: Store) -> list[int]:
    """The attempts that were ever claimed, in order."""
    return sorted(int(match[1]) for key in store.list("attempts") if (match := _ATTEMPT.fullmatch(key)))


def read(store: Store, attempt: int) -> AttemptInfo:
    """What an attempt claimed; all fields empty if its object is damaged, so that it blocks nobody."""
    known = {one.name for one in fields(AttemptInfo)} - {"attempt"}
    found = _read_json(store, f"attempts/{attempt}")
    return AttemptInfo(attempt=attempt, **{name: value for name, value in found.items() if name in known})


def latest(store: Store) -> AttemptInfo | None:
    """The newest attempt, alive or not."""
    claimed = numbers(store)
    return read(store, claimed[-1]) if claimed else None


def superseded(store: Store, attempt: int) -> bool:
    """Whether a higher attempt was claimed: the lower one writes nothing more and exits."""
    return any(number > attempt for number in numbers(store))


def is_alive(info: AttemptInfo, beacon_alive: BeaconAlive | None = None) -> bool:
    """Whether an attempt's process runs here, or its beacon is ALIVE in the Ray cluster it names."""
    if info.pid and info.host == this_host() and start_time(info.pid) == info.start_time:
        return True
    return beacon_alive is not None and beacon_alive(info)


def is_live(
    store: Store,
    info: AttemptInfo,
    beacon_alive: BeaconAlive | None = None,
    sleep: Sleep = time.sleep,
    looks: int = LOOKS,
) -> bool:
    """Whether an attempt has not said that it ended, and is alive: its process, its beacon, or signs from another host.

    A process of this host is judged at once. An attempt of another host is looked at until it gives a sign, or has had
    time for several: hosts' clocks need not agree, and one that is dead blocks nobody for longer than these 12 seconds.
    """
    if outcome(store, info.attempt) is not None:
        return False
    if is_alive(info, beacon_alive):
        return True
    return info.host not in ("", this_host()) and _gives_signs(store, info.attempt, sleep, looks)


def give_sign(store: Store, attempt: int) -> None:
    """Show hosts that cannot see this process that it lives."""
    store.put(f"attempts/{attempt}.sign", canonical_json({"time": time.time()}))


def _gives_signs(store: Store, attempt: int, sleep: Sleep, looks: int) -> bool:
    before = _read_json(store, f"attempts/{attempt}.sign")
    for _ in range(looks):
        sleep(SIGN_SECONDS / 2)
        if _read_json(store, f"attempts/{attempt}.sign") != before:
            return True
    return False


def end(store: Store, attempt: int, outcome: Outcome, cause: str = "", fingerprint: str = "", kind: str = "") -> None:
    """Write down how an attempt ended; the first word stands."""
    ended = AttemptEnd(attempt, outcome, cause, fingerprint, time.time(), kind)
    store.put_if_absent(f"attempts/{attempt}.end", canonical_json(asdict(ended)))


def outcome(store: Store, attempt: int) -> AttemptEnd | None:
    """How an attempt ended; None if it did not say (it runs, or was killed)."""
    found = _read_json(store, f"attempts/{attempt}.end")
    known = {one.name for one in fields(AttemptEnd)}
    return AttemptEnd(**found) if known - {"kind"} <= found.keys() <= known else None


def claim_generation(store: Store, group: str, info: Mapping[str, Any] | None = None) -> int:
    """Claim the next incarnation of a group; returns its number, from 1."""
    pattern = re.compile(rf"generations/{re.escape(group)}/(\d+)")
    while True:
        claimed = [int(match[1]) for key in store.list(f"generations/{group}") if (match := pattern.fullmatch(key))]
        number = max(claimed, default=0) + 1
        if store.put_if_absent(f"generations/{group}/{number}", canonical_json({**(info or {}), "generation": number})):
            return number


def _read_json(store: Store, key: str) -> dict[str, Any]:
    """An object's JSON; {} if it is not there or is no JSON object."""
    try:
        found = json.loads(store.get(key))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
