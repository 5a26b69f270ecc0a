"""Processes that outlive the call which started them, and waiting for what is not there yet."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kube.harness import cgroups


def command(*words: str | Path, namespace: str | None = None, stdin: str | None = None, check: bool = True) -> str:
    """Run to the end and return what it printed; RuntimeError with all it said if it failed."""
    done = subprocess.run(_inside(namespace, words), input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def start(log: Path, *words: str | Path, namespace: str, cgroup: str) -> int:
    """Start a process in a session and a cgroup of its own that writes to ``log``; returns its pid."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begun = subprocess.Popen(
            _inside(namespace, words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    cgroups.adopt(cgroup, begun.pid)
    begun.returncode = 0  # it is found by its cgroup and reaped by ``kill``
    return begun.pid


def _inside(namespace: str | None, words: Sequence[str | Path]) -> list[str]:
    """In a network namespace, and in no other one: ``ip netns exec`` would remount /sys and hide the cgroups."""
    return [*(["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []), *map(str, words)]


def wait_for(what: str, ready: Callable[[], object], seconds: float, every: float = 0.2) -> None:
    """Until ``ready`` is true; TimeoutError that says what was waited for and the last error."""
    end, last = time.monotonic() + seconds, ""
    while True:
        try:
            if ready():
                return
        except (RuntimeError, OSError) as error:
            last = f": {error}"
        if time.monotonic() > end:
            raise TimeoutError(f"{what} is not there after {seconds:.0f} s{last}")
        time.sleep(every)


def kill(pids: Sequence[int]) -> None:
    """Kill and wait until all are gone; those that are our children are reaped."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_for(f"the end of {list(pids)}", lambda: not any(_alive(pid) for pid in pids), 30)


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
