"""The supervisor with children that are real processes and no controllers: how they end, what they leave, who is told."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from unit.log_builders import local_store

from linckia.api.config import Recovery
from linckia.cli import main, supervise
from linckia.cli.runs import RunPlace
from linckia.cli.supervise import Process, keep_going
from linckia.cli.trainer import attempts
from linckia.decide.supervise import Life
from linckia_trainer.log import attempts as claims
from linckia_trainer.log.process import this_host

POLICY = Recovery(max_restarts_per_step=2, back_off_seconds=0)
FOLLOWS = "import os, signal, sys, time; from linckia.cli.supervise import follow_supervisor; follow_supervisor();"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
SLEEPS = "print('up', flush=True); time.sleep(60)"
# As `linckia train` does: SIGTERM asks for a stop, a second SIGINT is an interrupt.
OBEYS = """
def hear(number, frame):
    heard.append(number)
    print(signal.Signals(number).name, flush=True)
heard = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
print('up', flush=True)
while len(heard) < wanted:
    time.sleep(0.01)
time.sleep(0.3)  # time for one signal too many
"""
SECONDS = 30


class Runs:
    """Children that run these pieces of code in turn, and a run directory of which the attempts are known."""

    def __init__(self, *codes: str, heads: Sequence[int] = (), mine: bool = True) -> None:
        self.codes, self.heads, self.mine = list(codes), list(heads), mine
        self.seen: list[list[Life]] = []
        self.said: list[str] = []
        self.processes: list[Process] = []

    def command(self, lives: Sequence[Life]) -> list[str]:
        self.seen.append(list(lives))
        return [sys.executable, "-c", FOLLOWS + self.codes[len(lives)]]

    def attempts(self, process: Process | None) -> dict[str, object]:
        number = len(self.processes)
        if process is not None:
            self.processes.append(process)
            number += 1
        newest = {"attempt": number} if number else None
        return {"attempt": number if self.mine else 0, "newest": newest, "head": (self.heads or [0] * 9)[number - 1]}

    def go(self) -> int:
        return keep_going(self.command, self.attempts, POLICY, self.said.append)


def test_a_killed_child_is_started_again_until_it_is_done() -> None:
    runs = Runs(DIES, DIES, "sys.exit(0)")
    assert runs.go() == 0
    assert [life.exit_code for life in runs.seen[-1]] == [-9, -9]
    assert ["attempt 1 was killed by SIGKILL" in runs.said[0], len(runs.said)] == [True, 2]


def test_it_gives_up_when_the_log_does_not_grow() -> None:
    assert Runs(*[DIES] * 3).go() == 3
    assert Runs(*[DIES] * 4, "sys.exit(0)", heads=[1, 1, 2, 2, 2]).go() == 0


@pytest.mark.parametrize("code", [0, 2, 3, 4])
def test_exit_codes_that_are_a_persons_are_passed_on(code: int) -> None:
    runs = Runs(f"sys.exit({code})")
    assert runs.go() == code
    assert len(runs.seen) == 1


def test_an_attempt_that_somebody_else_started_meanwhile_is_left_alone() -> None:
    runs = Runs(DIES, mine=False)
    assert runs.go() == 4


def test_a_run_directory_that_does_not_answer_is_said_and_survived() -> None:
    runs = Runs(DIES, "sys.exit(0)")

    def broken(process: Process | None) -> dict[str, object]:
        raise OSError("the disk is gone")

    assert keep_going(runs.command, broken, POLICY, runs.said.append) == 0
    assert sum("the disk is gone" in words for words in runs.said) == 4


def test_nothing_of_a_dead_child_remains(tmp_path: Path) -> None:
    """Its children, in sessions of their own and out of its hands, are gone before the next one is started."""
    left = tmp_path / "left"
    leaves = f"""
import subprocess
for _ in range(2):
    inner = "import subprocess, time; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"
    one = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE, text=True)
    with open({str(left)!r}, "a") as file:
        file.write(f"{{one.pid}} {{one.stdout.readline()}}")
os.kill(os.getpid(), signal.SIGKILL)
"""
    looks = f"import pathlib; pids = pathlib.Path({str(left)!r}).read_text().split(); assert len(pids) == 4;"
    looks += "sys.exit(any(pathlib.Path('/proc', pid).exists() for pid in pids))"
    assert Runs(leaves, looks).go() == 0


def test_a_process_that_somebody_else_started_is_not_touched() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert Runs(DIES, "sys.exit(0)").go() == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_what_the_run_directory_says_of_a_process(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    place = RunPlace("run", store.uri, {}, None, None)
    nobody = {"attempt": 0, "newest": None, "head": 0, "cause": "", "fingerprint": "", "kind": ""}
    assert attempts(place, (47, 11)) == nobody
    for pid, started in ((47, 10), (47, 11), (48, 11)):
        claims.claim(store, {"host": this_host(), "pid": pid, "start_time": started, "claimed": 5.0}, takeover=True)
    claims.end(store, 2, "failed", "KeyError: 'x'", "KeyError:a.py:f", "exception")
    newest = {"attempt": 3, "claimed": 5.0}
    told = {"cause": "KeyError: 'x'", "fingerprint": "KeyError:a.py:f", "kind": "exception"}
    assert attempts(place, (47, 11)) == {**nobody, "attempt": 2, "newest": newest, **told}
    assert attempts(place, (48, 11)) == {**nobody, "attempt": 3, "newest": newest}
    assert attempts(place, (48, 12)) == attempts(place, None) == {**nobody, "newest": newest}


# ---- signals -----------------------------------------------------------------------------------------------------


def start(code: str, new_session: bool = True) -> subprocess.Popen[str]:
    """A supervisor as a process of its own, over one child that runs ``code``; the child has said "up"."""
    body = f"""
import sys
from linckia.api.config import Recovery
from linckia.cli.supervise import keep_going
def command(lives):
    return [sys.executable, "-c", {FOLLOWS + code!r}]
def say(words):
    print(words, flush=True)
sys.exit(keep_going(command, lambda process: {{"attempt": 1, "newest": {{"attempt": 1}}, "head": 0}}, Recovery(), say))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, start_new_session=new_session
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_nothing_is_started_again(
    started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    started.append(process := start("wanted = 1" + OBEYS))
    process.send_signal(number)
    assert process.communicate(timeout=SECONDS)[0] == "SIGTERM\n"
    assert process.returncode == 0


def test_a_second_interrupt_is_passed_on_as_such(started: list[subprocess.Popen[str]]) -> None:
    started.append(process := start("wanted = 2" + OBEYS + "sys.exit(130)"))
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SECONDS)[0] == "SIGINT\n"
    assert process.returncode == 130


def test_what_a_terminal_sends_to_both_is_not_said_twice(started: list[subprocess.Popen[str]]) -> None:
    """Ctrl-C at a terminal of its own: the child hears it once, and the supervisor starts nothing again."""
    main, other = os.openpty()
    body = f"""
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl({other}, termios.TIOCSCTTY, 0)
from linckia.api.config import Recovery
from linckia.cli.supervise import keep_going
sys.exit(keep_going(
    lambda lives: [sys.executable, "-c", {FOLLOWS + "wanted = 1" + OBEYS!r}],
    lambda process: {{"attempt": 1, "newest": {{"attempt": 1}}, "head": 0}}, Recovery(), print))
"""
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, pass_fds=[other])
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.write(main, b"\x03")
    assert process.communicate(timeout=SECONDS)[0] == "SIGINT\n"
    assert process.returncode == 0
    os.close(main)
    os.close(other)


def test_a_child_does_not_outlive_its_supervisor(started: list[subprocess.Popen[str]]) -> None:
    started.append(process := start("wanted = 1" + OBEYS))
    process.kill()
    assert process.communicate(timeout=SECONDS)[0] == "SIGTERM\n"  # its end closes the pipe that both write to


def test_a_stop_while_it_waits_to_start_again_is_heard() -> None:
    runs = Runs(DIES, DIES, "sys.exit(7)")
    policy = Recovery(max_restarts_per_step=4, back_off_seconds=50)
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        if "in 50 s" in words:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # the process may have threads that take it

    assert keep_going(runs.command, runs.attempts, policy, say) == 0
    assert said[-1] == "supervisor: stopped; the same command goes on with the run"
    assert len(runs.seen) == 2


def test_signals_and_orphans_are_everybodys_again_afterwards() -> None:
    assert Runs("sys.exit(0)").go() == 0
    assert not supervise.AWAITED & signal.pthread_sigmask(signal.SIG_BLOCK, [])


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the supervisor would start: first, after an end without a claim, and after an attempt's end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sort.yaml").write_text(
        "model: {path: m, make: build.py:make}\ndata: {train: {reasoning_gym: {task: chain_sum}}}\nreward: {verifier: true}\n"
    )
    (tmp_path / "build.py").write_text("")
    found: list[list[str]] = []

    def go(command: Any, read: Any, policy: Recovery, say: Any) -> int:
        unclaimed = Life(0, -9, 0, 0.0)
        lives = [[], [unclaimed], [unclaimed, Life(1, -9, 0, 0.0)]]
        found.extend(command(one) for one in lives)
        assert read(None)["newest"] is None
        assert policy == Recovery(back_off_seconds=7)
        return 3

    monkeypatch.setattr(supervise, "keep_going", go)
    return found


def train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["linckia", "train", "sort.yaml", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_the_controller_gets_the_same_arguments_and_takes_over(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    back_off = "recovery.back_off_seconds=7"
    assert train(monkeypatch, back_off, "--supervise", "--fresh", "--address", "auto", "--quiet") == 3
    given = ["sort.yaml", back_off, "--address", "auto", "--quiet"]
    assert [one[one.index("train") :] for one in commands] == [
        ["train", "--fresh", *given],
        ["train", "--takeover", "--fresh", *given],
        ["train", "--takeover", *given],  # the run that was begun afresh is not moved aside
    ]
    assert all(one[0] == sys.executable for one in commands)


def test_only_who_says_so_takes_over_at_the_first_start(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(monkeypatch, "recovery.back_off_seconds=7", "--supervise", "--takeover") == 3
    assert [("--takeover" in one) for one in commands] == [True] * 3


def test_a_fork_is_not_supervised(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, "--supervise", "--fork", "other") == 2
    assert "--supervise with run.name=other" in capsys.readouterr().err
    assert commands == []
