"""Who is slower than its peers: members of one role in the same stage of the same step, compared again and again.

Only members that do not wait for each other can be told apart: engines while they generate, members that score. Inside
a collective all go at the pace of the slowest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

MemberKey = tuple[str, int]
"""(group, rank)"""
StageKey = tuple[str, str]
"""(role, stage)"""

MIN_COMPARISONS = 10
MAX_COMPARISONS = 50  # older ones fade, so that a member that has recovered is forgiven
SURE_DEVIATIONS = 4.0


@dataclass(frozen=True)
class Slowness:
    """ln(own seconds per unit of progress / the peers' median): how often compared, mean and mean squared deviation."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def factor(self) -> float:
        """How many times slower than its peers; below 1: faster."""
        return math.exp(self.mean)

    def exceeds(self, factor: float) -> bool:
        """Whether it is that much slower, and surely so: not by the chance of a few uneven steps."""
        error = math.sqrt(self.variance / max(1, self.count))
        return self.count >= MIN_COMPARISONS and self.mean > math.log(factor) and self.mean > SURE_DEVIATIONS * error

    def with_value(self, value: float) -> "Slowness":
        count = min(self.count + 1, MAX_COMPARISONS)
        off = value - self.mean
        variance = self.variance + (off * off * (count - 1) / count - self.variance) / count
        return Slowness(count, self.mean + off / count, variance)


@dataclass(frozen=True)
class Paces:
    """``latest``: each member's seconds per unit in the step being compared; ``slowness``: what came of it so far."""

    latest: Mapping[StageKey, tuple[int, Mapping[MemberKey, float]]] = field(default_factory=dict)
    slowness: Mapping[tuple[MemberKey, str], Slowness] = field(default_factory=dict)

    def without_others(self, members: set[MemberKey]) -> "Paces":
        """Forget members that are gone."""
        if all(member in members for member, _ in self.slowness):
            return self
        return replace(self, slowness={key: one for key, one in self.slowness.items() if key[0] in members})

    def without_group(self, group: str) -> "Paces":
        """Forget a group's members: what comes next is another generation."""
        return replace(self, slowness={key: one for key, one in self.slowness.items() if key[0][0] != group})


def with_pace(paces: Paces, stage: StageKey, member: MemberKey, step: int, seconds_per_unit: float) -> Paces:
    """Add what a member needed per unit of progress in a stage; the stage's members are compared when the step is over."""
    at, measured = paces.latest.get(stage, (step, {}))
    if at == step:
        return replace(paces, latest={**paces.latest, stage: (step, {**measured, member: seconds_per_unit})})
    slowness = dict(paces.slowness)
    for one, own in measured.items():
        others = [pace for other, pace in measured.items() if other != one]
        if others:
            key = (one, stage[1])
            slowness[key] = slowness.get(key, Slowness()).with_value(math.log(own / median(others)))
    return Paces({**paces.latest, stage: (step, {member: seconds_per_unit})}, slowness)
