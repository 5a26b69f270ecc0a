"""Whether the controller is started again after it ended, after what wait, or with which code the supervisor ends instead.

The budget is that of a group (``budget``): what counts is how often a controller failed at one head of the log. A run whose
log grows is not in a loop.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from linckia.api.config import Recovery
from linckia.decide.budget import SAME_EXCEPTION_LIMIT, back_off

DONE = 0
USER_ERROR = 2
CRASH_LOOP = 3
REPLACED = 4
INTERRUPTED = 130
SAME_COMMAND = "type the same command again: the run goes on from step {step}"


@dataclass(frozen=True)
class Life:
    """One life of a controller, as it ended.

    ``attempt``: what it claimed; 0 if it ended before that. ``exit_code``: negative for the signal that ended it.
    ``head``: the log's head when it ended. ``ended``: seconds, on the clock of ``now``. ``cause``, ``fingerprint`` and
    ``kind`` are what it wrote down itself: ``exception`` for what would be raised again, ``death`` for what came from
    outside. ``replaced``: somebody else claimed a newer attempt meanwhile.

    Example: ``Life(attempt=3, exit_code=-9, head=12, ended=1764560000.0)``
    """

    attempt: int
    exit_code: int
    head: int
    ended: float
    cause: str = ""
    fingerprint: str = ""
    kind: str = ""
    replaced: bool = False

    @property
    def died_of(self) -> str:
        """Such as ``was killed by SIGKILL`` or ``failed: KeyError: 'x'``."""
        if self.cause:
            return f"failed: {self.cause}"
        return f"was killed by {_signal_name(-self.exit_code)}" if self.exit_code < 0 else _ended_with(self.exit_code)


@dataclass(frozen=True)
class Start:
    """Start the controller again ``after_seconds`` from now (0: at once)."""

    after_seconds: float
    words: str


@dataclass(frozen=True)
class Exit:
    """End with ``code``; ``words`` say why, and what a person does next. Empty: the controller has said it all."""

    code: int
    words: str


def next_start(lives: Sequence[Life], now: float, policy: Recovery, stopping: bool = False) -> Start | Exit:
    """What follows the end of the last of ``lives``, all that this supervisor has started, in order.

    - A person has the last word: after a finish, a stop, an interrupt, an error that only a person can put right, or a newer
      attempt that somebody else started, nothing is started again. ``stopping``: the supervisor was told to stop.
    - The same exception twice in a row, with no more than one step between, is a crash loop. So is one failure more than
      ``max_restarts_per_step`` at one head of the log, whatever each was.
    - The first start again at a head is at once; the others wait as a group's restarts do.
    """
    last = lives[-1]
    if stopping:
        return Exit(128 - last.exit_code if last.exit_code < 0 else last.exit_code, "")
    if last.exit_code == REPLACED or last.replaced:
        return Exit(REPLACED, "a newer attempt of this run was started elsewhere; this one is not started again")
    if last.exit_code in (DONE, USER_ERROR):
        return Exit(last.exit_code, "")
    if last.exit_code == CRASH_LOOP:
        return Exit(CRASH_LOOP, "")
    if last.exit_code in (INTERRUPTED, -signal.SIGINT):
        return Exit(INTERRUPTED, f"interrupted; {SAME_COMMAND.format(step=last.head)}")
    same = _same_exception(lives)
    if same >= SAME_EXCEPTION_LIMIT:
        return Exit(
            CRASH_LOOP,
            f"the controller failed twice in a row with the same exception ({last.fingerprint}): {last.cause}. "
            f"Next: correct the code that raised it, then {SAME_COMMAND.format(step=last.head)}.",
        )
    here = _at_this_head(lives)
    if len(here) > policy.max_restarts_per_step:
        return Exit(
            CRASH_LOOP,
            f"the controller ended {len(here)} times at step {last.head}, and recovery.max_restarts_per_step = "
            f"{policy.max_restarts_per_step}; last it {last.died_of}. Next: find out what ends it (memory, device, node), "
            f"then {SAME_COMMAND.format(step=last.head)}.",
        )
    wait = back_off(len(here) - 1, now - last.ended, policy.back_off_seconds)
    who = f"attempt {last.attempt}" if last.attempt else "the controller"
    when = f"in {wait:.0f} s" if wait else "now"
    return Start(wait, f"{who} {last.died_of}; it is started again {when} ({len(here)} at step {last.head})")


def _at_this_head(lives: Sequence[Life]) -> list[Life]:
    """The last lives that all ended at one head of the log."""
    found: list[Life] = []
    for life in reversed(lives):
        if life.head != lives[-1].head:
            break
        found.append(life)
    return found


def _same_exception(lives: Sequence[Life]) -> int:
    """How many of the last lives ended with the exception of the last one, each at most a step after the one before."""
    last, number = lives[-1], 0
    head = last.head
    for life in reversed(lives):
        if life.kind != "exception" or life.fingerprint != last.fingerprint or head - life.head > 1:
            break
        head = life.head
        number += 1
    return number


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ended_with(code: int) -> str:
    return f"ended with exit code {code}"
