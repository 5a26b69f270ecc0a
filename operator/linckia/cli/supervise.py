"""``linckia train --supervise``: starts the controller, sees it end, and starts it again where that helps.

The supervisor is light and holds nothing: no Ray, no model, no state but the lives it has seen. The controller is its child
in the same process group, so the terminal is the controller's. The two die together: whatever a dead controller leaves
becomes the supervisor's own child and is killed, and a controller whose supervisor dies is told to stop.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linckia.api.config import Recovery, RunConfig
from linckia.api.errors import UserError
from linckia.api.names import SUPERVISOR_VARIABLE
from linckia.api.process import start_time
from linckia.decide.supervise import Exit, Life, Start, next_start

STOPS = (signal.SIGINT, signal.SIGTERM)
AWAITED = {*STOPS, signal.SIGCHLD}
FROM_KERNEL = 0x80  # si_code of a signal that the terminal sent: to the whole process group, so also to the child
GONE_SECONDS = 10.0
POLL_SECONDS = 0.05
# Source: linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Process = tuple[int, int]  # pid and start time
Say = Callable[[str], None]


def supervise(config: RunConfig, arguments: Sequence[str], takeover: bool, fresh: bool) -> int:
    """Run ``linckia train`` with ``arguments`` until nobody but a person can go on; returns the exit code.

    ``takeover`` and ``fresh`` are the first start's. Every later one takes over, and starts afresh only while no attempt of
    ours has begun.
    """
    from linckia.cli import trainer
    from linckia.cli.runs import RunPlace

    uri = config.run.dir if "://" in config.run.dir else str(Path(config.run.dir).absolute())
    place = RunPlace(config.run.name, uri, config.storage.options, None, None)

    def command(lives: Sequence[Life]) -> list[str]:
        options = ["--takeover"] if takeover or lives else []
        if fresh and not any(life.attempt for life in lives):
            options.append("--fresh")
        # -P: the current directory is no more a place for modules than it is for the `linckia` that was typed
        return [sys.executable, "-P", "-m", "linckia.cli.main", "train", *options, *arguments]

    def attempts(process: Process | None) -> dict[str, Any]:
        return trainer.attempts(place, process)

    return keep_going(command, attempts, config.recovery, lambda text: print(text, file=sys.stderr, flush=True))


def keep_going(
    command: Callable[[Sequence[Life]], list[str]],
    attempts: Callable[[Process | None], dict[str, Any]],
    policy: Recovery,
    say: Say,
) -> int:
    """The loop. ``attempts`` reads the run directory: its newest attempt, and that of the named process."""
    lives: list[Life] = []
    others = frozenset(_children())  # of a program that uses this loop: none of our business
    with _signals_held(), _orphans_adopted():
        while True:
            before = _read(attempts, None, say)
            process, code, stopping = _one_life(command(lives), others)
            if code:
                clear_orphans(others)
            lives.append(_life(lives, before, _read(attempts, process, say), code))
            verdict = next_start(lives, time.time(), policy, stopping)
            if verdict.words:
                say(f"supervisor: {verdict.words}")
            if isinstance(verdict, Exit):
                return verdict.code
            if _told_to_stop(verdict, others):
                say("supervisor: stopped; the same command goes on with the run")
                return 0


def _one_life(command: Sequence[str], others: Set[int]) -> tuple[Process, int, bool]:
    """Start a controller and wait for its end: its process, its exit code, whether a stop was passed on to it."""
    child = subprocess.Popen(command, env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())})
    process = (child.pid, start_time(child.pid) or 0)
    stops = 0
    while True:
        _reap(others | {child.pid})  # whose end is read below
        if child.poll() is not None:
            return process, child.returncode, stops > 0
        heard = signal.sigwaitinfo(AWAITED)
        if heard.si_signo not in STOPS:
            continue
        stops += 1
        if heard.si_code != FROM_KERNEL:
            # A first SIGINT goes on as SIGTERM: a child that got the same SIGINT would take a second one for "at once".
            child.send_signal(signal.SIGTERM if stops == 1 else heard.si_signo)


def _life(lives: Sequence[Life], before: dict[str, Any], after: dict[str, Any], code: int) -> Life:
    attempt, newest = after.get("attempt", 0), after.get("newest")
    # Somebody else's: newer than ours, or, where ours claimed none, one that was not there before.
    replaced = newest is not None and (newest["attempt"] > attempt if attempt else newest != before.get("newest"))
    head = after.get("head", lives[-1].head if lives else 0)
    told = {name: after.get(name, "") for name in ("cause", "fingerprint", "kind")}
    return Life(attempt, code, head, time.time(), **told, replaced=replaced)


def _read(attempts: Callable[[Process | None], dict[str, Any]], process: Process | None, say: Say) -> dict[str, Any]:
    """A storage that does not answer says nothing: the controller itself tells what is wrong with it."""
    try:
        return attempts(process)
    except (OSError, UserError) as error:
        say(f"supervisor: the run directory cannot be read: {error}")
        return {}


def _told_to_stop(start: Start, others: Set[int]) -> bool:
    """Wait until it is time for ``start``; True if a stop came meanwhile."""
    until = time.monotonic() + start.after_seconds
    while True:
        _reap(others)
        heard = signal.sigtimedwait(AWAITED, max(0.0, until - time.monotonic()))
        if heard is None:
            return False
        if heard.si_signo in STOPS:
            return True


# ---- processes ---------------------------------------------------------------------------------------------------


def follow_supervisor() -> None:
    """In the child: stop when the supervisor dies, and take signals again, which it had held for us."""
    supervisor = int(os.environ.pop(SUPERVISOR_VARIABLE))
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    if os.getppid() != supervisor:  # it died before we could say so
        sys.exit(128 + signal.SIGTERM)


def clear_orphans(others: Set[int], within: float = GONE_SECONDS) -> list[int]:
    """SIGKILL what a dead controller left: Ray, members, engines. Returns those that do not go, for as long as we look.

    All of it is ours: an orphan becomes a child of the supervisor. Only children are killed, so no pid can be another
    process by then; their own children are ours in the next round.
    """
    deadline = time.monotonic() + within
    while left := _children() - others:
        if time.monotonic() > deadline:
            return sorted(left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        _reap(others)
    return []


def _reap(others: Set[int]) -> None:
    """Let go of children that ended, but for those whose end somebody else reads."""
    for pid in _children() - others:
        os.waitpid(pid, os.WNOHANG)


def _children() -> set[int]:
    """The children of this process, ended ones that nobody has waited for included."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(folder.name))
    return found


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait until we ask for them: none is lost between two looks, and none ends us before the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    try:
        yield
    finally:
        while signal.sigtimedwait(AWAITED, 0) is not None:  # said to a child that has ended
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _orphans_adopted() -> Iterator[None]:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
