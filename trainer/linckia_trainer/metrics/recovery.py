"""What recoveries cost: per step for the metric rows, and by label for Prometheus."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from linckia.api.names import role_of
from linckia_trainer.log.recoveries import Recovery
from linckia_trainer.metrics import names

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Sample = dict[str, Any]  # {"name": of names.LABELLED, "labels": {...}, "value": float}


def recovery_row(run: "Run") -> dict[str, float]:
    """What the step that ends lost to recoveries. Empty for a step that lost nothing, so that rows stay short."""
    counted = {
        names.SECONDS_STOOD_STILL: run.stood_still,
        names.SECONDS_REPLAYED: run.replayed,
        names.GENERATED_AGAIN: float(run.generated_again),
    }
    grown = {name: value - run.rows_hold.get(name, 0.0) for name, value in counted.items()}
    run.rows_hold = counted
    return {name: value for name, value in grown.items() if value > 0}


def recovery_metrics(run: "Run") -> list[Sample]:
    """Of this attempt, for ``/metrics``."""
    given_up = run.healer.unhealable
    found = totals(run.healer.finished, [given_up.field] if given_up is not None else [])
    found.append(_sample(names.TRAJECTORIES_AGAIN, (), run.generated_again))
    for replay, lost in (("useful", run.stood_still - run.replayed), ("lost", run.stood_still)):
        ratio = effective_ratio(time.monotonic() - run.loop_began, lost)
        found.append(_sample(names.EFFECTIVE_TIME, (replay,), ratio))
    return found


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
