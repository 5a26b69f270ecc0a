"""How long a member may show no progress before that is a hang. The limits adapt to what the run has shown.

A limit is the largest of
- ``recovery.hang_floor_seconds``,
- some times the longest wait between two ticks that this stage has shown and then gone on from, now or before,
- the smallest of four that are each more than it will ever need: what lies far beyond its usual tick; what lies beyond
  its usual whole time; many times the longest wait between two ticks; ``recovery.first_time_factor`` times its longest
  whole time (``beyond`` is counted in standard deviations of the logarithm of its whole times: a stage that always
  takes as long gets a short limit, one that takes a hundred times as long now and then a long one);
- a time limit that the stage has of its own, such as ``reward.timeout``.

A stage that has not been seen to end yet may take ``recovery.first_time_factor`` times the floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linckia.api.config import Recovery, RunConfig
from linckia.api.errors import UserError
from linckia.decide.history import History, Track

# Chosen by benchmarks/false_alarms.py: with less a healthy group is restarted now and then, with more hangs are found late.
TIMES_THE_LONGEST = 3.0
MOST_TIMES_THE_LONGEST = 150.0
TICK_DEVIATIONS = 10.0
WHOLE_DEVIATIONS = 4.25


@dataclass(frozen=True)
class WatchPolicy:
    """``recovery`` as configured, and the seconds that (role, stage) may take by a limit of their own."""

    recovery: Recovery
    own_limits: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        return self.recovery.hang_floor_seconds

    @property
    def first_time(self) -> float:
        """Seconds that something may take of which nothing was seen yet."""
        return self.recovery.first_time_factor * self.floor


def watch_policy(config: RunConfig) -> WatchPolicy:
    """The policy of a run."""
    return WatchPolicy(config.recovery, {("reward", "score"): config.reward.timeout})


def policy_to_json(policy: WatchPolicy) -> dict[str, Any]:
    """The policy for a watcher that is another process.

    Example: ``{"recovery": {"watcher": "operator", ...}, "own_limits": {"reward/score": 60.0}}``
    """
    return {
        "recovery": policy.recovery.model_dump(mode="json"),
        "own_limits": {f"{role}/{stage}": seconds for (role, stage), seconds in policy.own_limits.items()},
    }


def policy_from_json(found: Mapping[str, Any]) -> WatchPolicy:
    """The policy that ``policy_to_json`` wrote, also by a version that knew other settings. ValueError if it cannot be read."""
    if not isinstance(found.get("recovery"), Mapping) or not isinstance(found.get("own_limits"), Mapping):
        raise ValueError("a watch policy has recovery and own_limits")
    known = {key: value for key, value in found["recovery"].items() if key in Recovery.model_fields}
    limits = {}
    for key, seconds in found["own_limits"].items():
        role, _, stage = str(key).partition("/")
        limits[role, stage] = float(seconds)
    try:
        return WatchPolicy(Recovery.model_validate(known), limits)
    except UserError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Limit:
    """``seconds`` without progress, and ``why`` they are as many, to be read after "the limit is 60 s: "."""

    seconds: float
    why: str


def stage_limit(role: str, track: Track, history: History, policy: WatchPolicy) -> Limit:
    """The limit of a member in its stage."""
    limit = _learned_limit(role, track, history, policy)
    own = policy.own_limits.get((role, track.stage), 0.0)
    if own + policy.floor > limit.seconds and own:
        return Limit(own + policy.floor, f"its own time limit of {own:g} s comes first")
    return limit


def silence_limit(role: str, history: History, policy: WatchPolicy) -> Limit:
    """How long an idle member may leave its control call unanswered.

    It may have begun any of its role's stages without anybody having seen it, so it may take what these may take.
    """
    stages = [
        _learned_limit(role, _unseen(stage), history, policy).seconds for known, stage in history.times if known == role
    ]
    longest = history.silences.get(role, 0.0)
    seconds = min(max(stages, default=policy.first_time), policy.first_time)
    return Limit(
        max(seconds, policy.floor, TIMES_THE_LONGEST * longest),
        f"the longest silence it came back from is {longest:.0f} s",
    )


def _learned_limit(role: str, track: Track, history: History, policy: WatchPolicy) -> Limit:
    times = history.times.get((role, track.stage))
    if times is None:
        return Limit(max(policy.first_time, TIMES_THE_LONGEST * track.longest), "it was not seen before")
    longest = max(times.longest_tick, track.longest)
    deviation = times.wholes.deviation  # of ticks it is noise: those of short stages are hardly seen
    reach = min(
        times.ticks.beyond(TICK_DEVIATIONS * deviation),
        times.wholes.beyond(WHOLE_DEVIATIONS * deviation),
        MOST_TIMES_THE_LONGEST * max(longest, policy.recovery.watch_seconds),  # nothing shorter is seen for sure
        max(policy.first_time, policy.recovery.first_time_factor * times.longest),
    )
    seconds = max(policy.floor, TIMES_THE_LONGEST * longest, reach)
    return Limit(
        seconds,
        f"all of it usually takes {_seconds(times.wholes.usual)}, the longest wait in it so far was {_seconds(longest)}",
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def _unseen(stage: str) -> Track:
    return Track(0, stage, 0, 0.0, 0.0, 0.0, None)
