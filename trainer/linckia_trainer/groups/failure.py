"""What a failed call to a group means: a loss that a restart mends, or an error that only a person can."""

import re
from typing import Any

from ray import exceptions as ray_errors

from linckia.api.errors import FencedError, UserError
from linckia.decide.budget import Kind
from linckia_trainer.groups.engine_errors import EnginesLostError, NonFiniteError

DEATH: Kind = "death"
EXCEPTION: Kind = "exception"

# A user's own mistakes, a step that is not finite, engines that are others' loss, a newer attempt, callers' time limits.
PASSED_ON = (
    UserError,
    NonFiniteError,
    EnginesLostError,
    FencedError,
    ray_errors.GetTimeoutError,
    ray_errors.LocalRayletDiedError,
)
DEATHS = (
    ray_errors.RayActorError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
    ray_errors.OutOfMemoryError,
    ray_errors.RuntimeEnvSetupError,
)
BROKEN_TALK = re.compile(r"gloo|nccl|connection|timed? ?out|peer|TCPStore|DistStore", re.IGNORECASE)
FRAME = re.compile(r'File "(.+?)", line \d+, in (\S+)')


class GroupLostError(RuntimeError):
    """A generation of a group that failed a call, died or hangs; all of its members have to be replaced.

    ``kind`` is the budget's (``linckia.decide.budget``). ``place`` is where in the code, or how it died: with role and
    stage it makes the fingerprint that tells a fault that strikes again. ``stage`` is the group's own where it is known,
    else the run's counts. ``whole``: the members are well and only what Ray held for the call is gone: it is asked
    again, and nobody is replaced.
    """

    def __init__(
        self, group: str, generation: int, kind: Kind, place: str, cause: str, stage: str = "", whole: bool = False
    ) -> None:
        super().__init__(f"{group} (generation {generation}) is lost: {cause}")
        self.group = group
        self.generation = generation
        self.kind = kind
        self.place = place
        self.cause = cause
        self.stage = stage
        self.whole = whole


def lost(group: str, generation: int, error: Exception) -> GroupLostError | None:
    """The loss that ``error`` tells of; None if it is for a person, or for another part of the run, to deal with."""
    if isinstance(error, PASSED_ON):
        return None
    if isinstance(error, DEATHS):
        return GroupLostError(group, generation, DEATH, type(error).__name__, first_line(error))
    if isinstance(error, ray_errors.ObjectLostError):
        return GroupLostError(group, generation, DEATH, type(error).__name__, first_line(error), whole=True)
    cause = getattr(error, "cause", None) or error
    words = f"{type(cause).__name__}: {first_line(cause)}"
    # Talk between members that breaks off is the end of somebody, seen from beside; all else would be raised again.
    kind = DEATH if BROKEN_TALK.search(words) else EXCEPTION
    return GroupLostError(group, generation, kind, f"{type(cause).__name__}/{innermost_frame(error)}", words)


def death_of(group: str, generation: int, error: Exception) -> GroupLostError | None:
    """The loss, if ``error`` says that a member's process ended."""
    return lost(group, generation, error) if isinstance(error, DEATHS) else None


def innermost_frame(error: Any) -> str:
    """``file.py:function`` of the innermost frame that is not a library's own, from what the member wrote down."""
    frames = FRAME.findall(getattr(error, "traceback_str", "") or "")
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else "?"


def first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
