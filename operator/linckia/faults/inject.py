"""The faults, each a function that strikes one thing on this machine. None of them asks the run to take part.

Not here: a process killed for memory by the kernel or by Ray (from outside it is the same SIGKILL, and making one happen takes
memory limits that are the machine's, not ours), a network cut and a full disk (both change the machine for everybody on it).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from linckia.api.errors import UserError
from linckia.api.process import start_time

SLOW_PERIOD = 0.1  # seconds
SLOW_DUTY = 0.1

Targets = Literal["member", "state", "controller"]
HealedBy = Literal["replacement", "itself", "next attempt"]


@dataclass(frozen=True)
class Aim:
    """What is struck. ``started``: the process's start time, so that no other with its pid is hit. ``states``: folders of
    ``state/`` trees, one for each tier. ``seconds``: how long a fault that ends by itself lasts.

    Example: ``Aim("policy", 1, 4711, 88213, generation=2)``
    """

    group: str
    rank: int
    pid: int
    started: int | None
    generation: int = 0
    states: tuple[Path, ...] = ()
    seconds: float = 30.0


@dataclass(frozen=True)
class Fault:
    """``explains`` in one line for `--list`. ``healed_by`` what has to be seen afterwards."""

    strike: Callable[[Aim], None]
    explains: str
    targets: Targets
    healed_by: HealedBy


def kill(aim: Aim) -> None:
    _signal(aim, signal.SIGKILL)


def leave(aim: Aim) -> None:
    _signal(aim, signal.SIGTERM)


def hang(aim: Aim) -> None:
    _signal(aim, signal.SIGSTOP)


def slow(aim: Aim) -> None:
    """Let the process run a tenth of the time. It runs freely again at the end, whatever happens here."""
    deadline = time.monotonic() + aim.seconds
    try:
        while time.monotonic() < deadline:
            _signal(aim, signal.SIGSTOP)
            time.sleep(SLOW_PERIOD * (1 - SLOW_DUTY))
            _signal(aim, signal.SIGCONT)
            time.sleep(SLOW_PERIOD * SLOW_DUTY)
    finally:
        with contextlib.suppress(UserError):  # it is gone: there is nothing to let go on
            _signal(aim, signal.SIGCONT)


def corrupt_state(aim: Aim) -> None:
    for path in newest_states(aim):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            found = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([found[0] ^ 0xFF]))
    kill(aim)


def truncate_state(aim: Aim) -> None:
    for path in newest_states(aim):
        os.truncate(path, path.stat().st_size // 2)
    kill(aim)


def newest_states(aim: Aim) -> list[Path]:
    """The files of this rank's newest saved state, in every tier that has it. UserError if none is saved here."""
    found = [path for tier in aim.states for path in tier.glob(f"state/{aim.group}/*/*/{aim.rank}")]
    if not found:
        raise UserError(
            "--target",
            f"{aim.group}/{aim.rank}",
            f"no state of it is saved in {', '.join(map(str, aim.states)) or 'any folder of this machine'}",
            "wait until one is saved, or choose policy or critic",
        )
    newest = max(path.parts[-3] for path in found)
    return [path for path in found if path.parts[-3] == newest]


def _signal(aim: Aim, number: int) -> None:
    if aim.started is None or start_time(aim.pid) != aim.started:
        raise UserError(
            "--target", f"{aim.group}/{aim.rank}", f"its process {aim.pid} is gone already", "choose it again"
        )
    os.kill(aim.pid, number)


FAULTS: dict[str, Fault] = {
    "kill": Fault(
        kill, "SIGKILL: the process is gone at once, as after a crash or an OOM kill", "member", "replacement"
    ),
    "exit": Fault(leave, "SIGTERM: the process is told to go, as when its node is drained", "member", "replacement"),
    "hang": Fault(
        hang, "SIGSTOP: the process lives and does nothing; the watcher has to find it", "member", "replacement"
    ),
    "slow": Fault(slow, "a straggler: it runs a tenth of the time for --seconds", "member", "itself"),
    "corrupt-state": Fault(
        corrupt_state,
        "a byte of the rank's newest state is changed in every tier, then SIGKILL: an older state has to do",
        "state",
        "replacement",
    ),
    "truncate-state": Fault(
        truncate_state,
        "the rank's newest state is cut in half in every tier, then SIGKILL: an older state has to do",
        "state",
        "replacement",
    ),
    "controller-kill": Fault(
        kill,
        "SIGKILL of the controller; whoever supervises it has to start the next attempt",
        "controller",
        "next attempt",
    ),
    "controller-hang": Fault(
        hang, "SIGSTOP of the controller: the next attempt has to fence it", "controller", "next attempt"
    ),
}
