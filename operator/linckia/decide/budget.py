"""Whether a lost group is restarted once more, and after how long; or whether the same fault would strike for ever."""

from collections.abc import Sequence
from dataclasses import dataclass

from linckia.api.config import Recovery as RecoveryPolicy
from linckia.api.names import role_of

LONGEST_BACK_OFF = 60.0  # seconds
USER_CODE_LIMIT = 2


@dataclass(frozen=True)
class Failure:
    """One loss of a group. ``kind``: "call" is an exception that a living member raised; anything else is a death.

    ``place``: the exception's type and innermost frame, or how the process died.

    Example: ``Failure("policy", step=7, stage="update", kind="process", place="ActorDiedError", time=1.79e9)``
    """

    group: str
    step: int
    stage: str
    kind: str
    place: str
    time: float

    @property
    def fingerprint(self) -> str:
        """The same fault that strikes again has the same."""
        return f"{role_of(self.group)}:{self.stage}:{self.place}"


@dataclass(frozen=True)
class Restart:
    after_seconds: float


@dataclass(frozen=True)
class Stop:
    reason: str
    next_step: str


def next_restart(earlier: Sequence[Failure], failure: Failure, now: float, policy: RecoveryPolicy) -> Restart | Stop:
    """The verdict on ``failure``, after those ``earlier`` in the run's life."""
    same = [one for one in earlier if one.step == failure.step and one.fingerprint == failure.fingerprint]
    if failure.kind == "call" and len(same) + 1 >= USER_CODE_LIMIT:
        return Stop(
            f"it failed {len(same) + 1} times in the same way in step {failure.step} ({failure.fingerprint})",
            "mend what it says, then type the same command again: the run goes on from its log",
        )
    if len(same) + 1 >= policy.max_restarts_per_step:
        return Stop(
            f"it was lost {len(same) + 1} times in the same way in step {failure.step} ({failure.fingerprint})",
            "look at the cause and the machine, then type the same command again: the run goes on from its log",
        )
    in_step = [one for one in earlier if one.step == failure.step and one.group == failure.group]
    wait = policy.back_off_seconds * 2 ** (len(in_step) - 1) if in_step else 0.0
    return Restart(min(LONGEST_BACK_OFF, wait))
