"""How often and how soon a failed group is restarted, and when the run stops instead of looping.

A failure has a fingerprint: what failed, where and how, without what changes from one time to the next. Restarts are
counted within one step: a run whose log grows is not in a loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from linckia.api.config import Recovery

Kind = Literal["exception", "death", "hang", "slow"]

SAME_EXCEPTION_LIMIT = 2  # the second one with the same fingerprint shows that another try ends the same
LONGEST_BACK_OFF_SECONDS = 300.0


@dataclass(frozen=True)
class Failure:
    """A group failed. ``kind``: ``exception`` only for one raised in the user's own code.

    Example: ``Failure("policy", 12, "policy/update/SIGKILL", "death", "rank 1 was killed by SIGKILL")``
    """

    group: str
    step: int
    fingerprint: str
    kind: Kind
    cause: str


@dataclass(frozen=True)
class RecoveryRecord:
    """A restart that was begun. All that the budget knows; made again from ``recoveries/`` by a new attempt.

    Example: ``RecoveryRecord("policy", 12, "policy/update/SIGKILL", "death", time=1764560000.0)``; ``time`` is in
    seconds on the same clock as ``now`` of ``next_restart``.
    """

    group: str
    step: int
    fingerprint: str
    kind: Kind
    time: float


@dataclass(frozen=True)
class Restart:
    """Start the group again ``after_seconds`` from now (0: at once)."""

    after_seconds: float


@dataclass(frozen=True)
class Stop:
    """The run is in a crash loop: it ends with ``reason``; ``next_step`` is what a person does about it."""

    reason: str
    next_step: str


def exception_fingerprint(role: str, stage: str, exception_type: str, frame: str) -> str:
    """``frame``: file and function of the innermost frame in the user's code, such as ``reward.py:score``.

    Example: ``reward/score/KeyError/reward.py:score``
    """
    return f"{role}/{stage}/{exception_type}/{frame}"


def death_fingerprint(role: str, stage: str, signal: str) -> str:
    """``signal``: how the process went, such as ``SIGKILL``, ``OUT_OF_MEMORY``, ``NODE_DIED`` or ``hung``.

    Example: ``policy/update/SIGKILL``
    """
    return f"{role}/{stage}/{signal}"


def next_restart(
    recoveries: Sequence[RecoveryRecord], failure: Failure, now: float, policy: Recovery
) -> Restart | Stop:
    """Whether and when the group of a failure is restarted; ``recoveries`` does not hold this failure yet.

    - An exception in the user's code stops the run the second time it has the same fingerprint within one step.
    - Deaths and hangs stop it when the group has used ``max_restarts_per_step``. They are counted per group, whatever
      their fingerprints: a lost node takes many groups once, a crash loop takes one group many times.
    - The first restart of a group within a step is at once. The second waits ``back_off_seconds`` after the one before
      it, the third twice as long, and so on up to five minutes.
    """
    within_step = [one for one in recoveries if one.step == failure.step]
    if failure.kind == "exception":
        same = [one for one in within_step if (one.kind, one.fingerprint) == ("exception", failure.fingerprint)]
        if len(same) + 1 >= SAME_EXCEPTION_LIMIT:
            return Stop(
                f"{failure.group} failed {_times(len(same) + 1)} in step {failure.step} with the same exception "
                f"({failure.fingerprint}): {failure.cause}",
                "correct the code that raised it, then start the run again: it goes on from this step",
            )
    earlier = [one for one in within_step if one.group == failure.group]
    if len(earlier) >= policy.max_restarts_per_step:
        return Stop(
            f"{failure.group} failed {_times(len(earlier) + 1)} in step {failure.step}, and "
            f"recovery.max_restarts_per_step = {policy.max_restarts_per_step}; {_fingerprints(earlier, failure)}; "
            f"last: {failure.cause}",
            "find out what ends it (memory, device, node), then start the run again: it goes on from this step",
        )
    since_last = now - max((one.time for one in earlier), default=now)
    return Restart(back_off(len(earlier), since_last, policy.back_off_seconds))


def restarts_left(recoveries: Sequence[RecoveryRecord], group: str, step: int, policy: Recovery) -> int:
    """How many more deaths or hangs of ``group`` within ``step`` are answered by a restart."""
    used = sum((one.group, one.step) == (group, step) for one in recoveries)
    return max(0, policy.max_restarts_per_step - used)


def back_off(earlier: int, since_last: float, first_seconds: float) -> float:
    """Seconds to wait still before a restart that ``earlier`` ones came before, the last of them ``since_last`` seconds ago.

    0 for the first, then ``first_seconds``, doubled each time, up to five minutes.
    """
    if not earlier or not first_seconds:
        return 0.0
    # The exponent is bounded so that a large budget cannot overflow it.
    wait = min(first_seconds * 2.0 ** min(earlier - 1, 32), LONGEST_BACK_OFF_SECONDS)
    return min(wait, max(0.0, wait - since_last))  # a clock that was set back makes no wait longer


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _fingerprints(earlier: Sequence[RecoveryRecord], failure: Failure) -> str:
    found = [one.fingerprint for one in earlier] + [failure.fingerprint]
    return ", ".join(f"{found.count(one)} x {one}" for one in dict.fromkeys(found))
