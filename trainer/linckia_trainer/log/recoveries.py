"""Losses and recoveries of a run, one object each: budgets and crash-loop counts are rebuilt from these alone.

Objects: ``recoveries/{n:06d}`` a loss, written when it is seen; ``recoveries/{n:06d}.end`` how the recovery that began with
it ended.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from linckia.decide.budget import RecoveryRecord
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.store import Store

_LOSS = re.compile(r"recoveries/(\d+)")


@dataclass(frozen=True)
class Recovery:
    """One group brought back. Immutable; ``seconds`` by part: detect, wait, fence, place, start, rendezvous, load, restore,
    replay, refit.

    Example: ``Recovery("policy", "policy", 1, 2, "process", "ActorDiedError", 7, "update", 1, 1.79e9, 11.2, {...})``
    """

    group: str
    role: str
    generation_lost: int
    generation: int
    kind: str
    cause: str
    step: int
    stage: str
    attempt: int
    time: float
    seconds_total: float
    seconds: dict[str, float] = field(default_factory=dict)


def note_loss(store: Store, loss: RecoveryRecord) -> int:
    """Write a loss down; returns its number."""
    taken = [int(match[1]) for key in store.list("recoveries") if (match := _LOSS.fullmatch(key))]
    number = max(taken, default=0) + 1
    while not store.put_if_absent(f"recoveries/{number:06d}", canonical_json(asdict(loss))):
        number += 1
    return number


def note_recovery(store: Store, number: int, recovery: Recovery) -> None:
    """Write down how the recovery that began with loss ``number`` ended."""
    store.put_if_absent(f"recoveries/{number:06d}.end", canonical_json(asdict(recovery)))


def losses(store: Store) -> list[RecoveryRecord]:
    """Every loss the run has seen, oldest first. What is damaged is left out: it counts against no budget."""
    return _read(store, lambda key: _LOSS.fullmatch(key) is not None, lambda found: RecoveryRecord(**found))


def recoveries(store: Store) -> list[Recovery]:
    """Every recovery that ended well, oldest first."""
    return _read(store, lambda key: key.endswith(".end"), lambda found: Recovery(**found))


def _read(store: Store, wanted: Callable[[str], bool], make: Callable[[dict[str, Any]], Any]) -> list[Any]:
    found = []
    for key in sorted(filter(wanted, store.list("recoveries"))):
        try:
            found.append(make(json.loads(store.get(key))))
        except (FileNotFoundError, ValueError, TypeError):
            continue
    return found
