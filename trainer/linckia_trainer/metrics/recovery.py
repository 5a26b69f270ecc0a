"""What recoveries cost: per step for the metric rows, and by label for Prometheus."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from linckia.api.names import role_of
from linckia_trainer.log.recoveries import Recovery
from linckia_trainer.metrics import names

if TYPE_CHECKING:
    from linckia_trainer.groups.replace import Parts
    from linckia_trainer.healing import Healer

Sample = dict[str, Any]  # {"name": of names.LABELLED, "labels": {...}, "value": float}


class Costs:
    """What an attempt has lost to recoveries so far. Seconds are the loop's: what is healed beside it costs it nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.stood_still = 0.0  # seconds that the loop waited for lost groups, replay included
        self.replayed = 0.0  # seconds of it that records were applied again
        self.generated_again = 0  # answers that a lost engine had not finished, so others gave them
        self.in_rows: dict[str, float] = {}

    @contextmanager
    def standing_still(self, parts: "Parts | None" = None) -> Iterator[None]:
        """The loop waits for a lost group. ``parts`` of its recovery tell how much of that is replay."""
        began, before = self.clock(), parts.seconds.get("replay", 0.0) if parts else 0.0
        try:
            yield
        finally:
            self.stood_still += self.clock() - began
            self.replayed += parts.seconds.get("replay", 0.0) - before if parts else 0.0

    def row(self) -> dict[str, float]:
        """What was lost since the last row. Without what was not, so that rows stay short."""
        now = {
            names.SECONDS_STOOD_STILL: self.stood_still,
            names.SECONDS_REPLAYED: self.replayed,
            names.GENERATED_AGAIN: float(self.generated_again),
        }
        grown = {name: value - self.in_rows.get(name, 0.0) for name, value in now.items()}
        self.in_rows = now
        return {name: value for name, value in grown.items() if value > 0}

    def ratios(self) -> dict[str, float]:
        """Effective training time, with replayed records as ``useful`` (as RobustRL counts) and as ``lost`` time."""
        passed = self.clock() - self.began
        return {
            "useful": effective_ratio(passed, self.stood_still - self.replayed),
            "lost": effective_ratio(passed, self.stood_still),
        }


def recovery_metrics(healer: "Healer") -> list[Sample]:
    """Of this attempt, for ``/metrics``."""
    found = totals(healer.finished, [healer.unhealable.field] if healer.unhealable is not None else [])
    found.append(_sample(names.TRAJECTORIES_AGAIN, (), healer.costs.generated_again))
    return found + [_sample(names.EFFECTIVE_TIME, (replay,), ratio) for replay, ratio in healer.costs.ratios().items()]


def totals(finished: Sequence[Recovery], given_up: Sequence[str]) -> list[Sample]:
    """Recoveries counted by role, cause and result, and their seconds by part. ``given_up``: groups. Pure."""
    counts: dict[tuple[str, ...], float] = defaultdict(float)
    seconds: dict[tuple[str, ...], float] = defaultdict(float)
    for one in finished:
        counts[one.role, one.kind, "healed"] += 1
        for part, spent in one.seconds.items():
            seconds[one.role, part] += spent
    for group in given_up:
        counts[role_of(group), "budget", "given up"] += 1
    return [
        *(_sample(names.RECOVERIES, labels, value) for labels, value in sorted(counts.items())),
        *(_sample(names.RECOVERY_SECONDS, labels, value) for labels, value in sorted(seconds.items())),
    ]


def effective_ratio(seconds: float, lost: float) -> float:
    """The share of ``seconds`` that was not lost; 1 before any time has passed."""
    return 1.0 if seconds <= 0 else max(0.0, 1 - lost / seconds)


def _sample(metric: names.Labelled, labels: Sequence[str], value: float) -> Sample:
    return {"name": metric.name, "labels": dict(zip(metric.labels, labels, strict=True)), "value": value}
