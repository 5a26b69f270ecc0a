"""What a fault trial strikes, drawn from its seed alone, so that a trial can be asked for again. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STAGES = ("recover", "generate", "score", "record", "update", "sync", "save", "evaluate")  # in the order of the loop
KINDS = {"one": 0.5, "two at once": 0.25, "while healing": 0.25}


@dataclass(frozen=True)
class Strike:
    """One fault at one member, at a share of its stage's usual seconds after the stage began.

    ``healing``: its moment is counted from the begin of the recovery that the first strike set off, in shares of a usual
    recovery; if its group is being replaced then, it hits the generation that is coming up.

    Example: ``Strike("kill", "policy", rank=1, step=2, stage="update", share=0.4)``
    """

    fault: str
    group: str
    rank: int
    step: int
    stage: str
    share: float
    healing: bool = False


@dataclass(frozen=True)
class TrialPlan:
    """One trial's strikes. ``kind`` is one of ``KINDS``."""

    seed: int
    kind: str
    strikes: tuple[Strike, ...]


def draw(seed: int, ranks: Mapping[str, int], steps: int, faults: Sequence[str]) -> TrialPlan:
    """Any fault, role, rank and moment alike. ``ranks``: members of each group of the run."""
    rolled = random.Random(seed)
    kind = rolled.choices(list(KINDS), list(KINDS.values()))[0]
    first = _strike(rolled, sorted(ranks), ranks, steps, faults)
    if kind == "one":
        return TrialPlan(seed, kind, (first,))
    if kind == "two at once":
        others = sorted(group for group in ranks if group != first.group)
        other = _strike(rolled, others, ranks, steps, faults)
        again = Strike(other.fault, other.group, other.rank, first.step, first.stage, first.share)
        return TrialPlan(seed, kind, (first, again))
    other = _strike(rolled, sorted(ranks), ranks, steps, faults)
    group, rank = (first.group, first.rank) if rolled.random() < 0.5 else (other.group, other.rank)
    again = Strike(other.fault, group, rank, first.step, first.stage, rolled.random(), healing=True)
    return TrialPlan(seed, kind, (first, again))


def moment(step: int, stage: str) -> tuple[int, int]:
    """A place in the loop, so that places can be compared."""
    return step, STAGES.index(stage) if stage in STAGES else -1


def _strike(
    rolled: random.Random, groups: Sequence[str], ranks: Mapping[str, int], steps: int, faults: Sequence[str]
) -> Strike:
    group = rolled.choice(groups)
    stage = rolled.choice(STAGES)
    step = rolled.randint(1, steps)
    step = 0 if stage == "recover" else steps if stage == "evaluate" else step  # the only ones that have them
    return Strike(rolled.choice(list(faults)), group, rolled.randrange(ranks[group]), step, stage, rolled.random())
