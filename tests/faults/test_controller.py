"""The controller itself is killed, and stopped, replaced and continued: its run goes on, and no second one ever writes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.live import (
    START_SECONDS,
    Live,
    assert_equal_runs,
    await_nothing_left,
    started,
)
from local import bits

from linckia.api.access import read_run_file
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.process import start_time

REPLACED_SECONDS = 10


@dataclass
class Strike:
    """A controller that was killed in a stage, and the members that it had: the witness."""

    stage: str
    head: int
    attempt: int
    members: int


@pytest.fixture(scope="module")
def supervised(work: Path, golden: Path) -> Iterator[tuple[Live, list[Strike]]]:
    """A run under a supervisor, whose controller is killed in two stages, three records and more apart."""
    live = started(work, "supervised", "--supervise")
    try:
        strikes = [strike(live, "update", 3), strike(live, "generate", 8)]
        assert live.finish() == 0, live.said()
        yield live, strikes
    finally:
        live.kill()


def strike(live: Live, stage: str, not_before: int) -> Strike:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert live.process.poll() is None, live.said()
        view = live.view()
        if view is not None and view["stage"] == stage and view["step"] >= not_before:
            controller = controller_pid(live)
            members = len(psutil.Process(controller).children(recursive=True))
            os.kill(controller, signal.SIGKILL)
            return Strike(view["stage"], view["log_head"], view["attempt"], members)
        time.sleep(0.005)
    raise AssertionError(f"never seen in stage {stage}: {live.said()}")


def controller_pid(live: Live) -> int:
    file = read_run_file(live.place / "runs" / live.place.name)
    assert file is not None
    return file.pid


def test_a_killed_controller_is_started_again_by_its_supervisor(supervised: tuple[Live, list[Strike]]) -> None:
    live, strikes = supervised
    assert [(one.stage, one.attempt) for one in strikes] == [("update", 1), ("generate", 2)]
    assert strikes[0].head < strikes[1].head
    assert all(one.members >= 8 for one in strikes)
    store = bits.run_store(live.place)
    assert attempts.numbers(store) == [1, 2, 3]
    ends = [attempts.outcome(store, number) for number in (1, 2, 3)]
    assert [end.outcome if end else None for end in ends] == [None, None, "finished"]
    assert live.output.read_text().count("was killed by SIGKILL; it is started again now") == 2


def test_the_run_ends_with_the_golden_bits_and_nothing_is_left(
    golden: Path, supervised: tuple[Live, list[Strike]]
) -> None:
    assert_equal_runs(supervised[0].place, golden)
    await_nothing_left(supervised[0].place)


@dataclass
class Zombie:
    """A controller that was stopped, replaced and continued. ``left``: of its listed processes, once it was replaced."""

    head: int
    head_before: int
    seconds: float
    code: int
    listed: int
    left: int


@pytest.fixture(scope="module")
def continued(work: Path, golden: Path) -> Iterator[tuple[Live, Zombie]]:
    first = started(work, "zombie")
    second = None
    try:
        view = first.await_view(lambda view: view["stage"] == "score" and view["step"] >= 3, "the third step's score")
        os.kill(first.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, first.process.pid, os.WSTOPPED)  # the witness that it stands still
        listed = [one for path in pids_files(first.place) for one in json.loads(path.read_text()) if runs(one)]
        second = started(work, "zombie", "--takeover")
        seen = second.await_view(lambda seen: seen["log_head"] > view["log_head"], "a record of the second attempt")
        left = sum(runs(one) for one in listed)
        os.kill(first.process.pid, signal.SIGCONT)
        began = time.monotonic()
        code = first.finish(REPLACED_SECONDS + 5)
        took = time.monotonic() - began
        assert second.finish() == 0, second.said()
        yield second, Zombie(seen["log_head"], view["log_head"], took, code, len(listed), left)
    finally:
        for live in (first, second):
            if live is not None:
                live.kill()


def runs(process: dict[str, Any]) -> bool:
    return start_time(process["pid"]) == process["start_time"]


def pids_files(place: Path) -> list[Path]:
    return list((place / "runs" / place.name / "generations").glob("*/*.pids"))


def test_a_continued_controller_sees_that_it_was_replaced_and_exits(continued: tuple[Live, Zombie]) -> None:
    _, zombie = continued
    assert zombie.code == 4
    assert zombie.seconds < REPLACED_SECONDS


def test_the_newer_attempt_had_killed_its_members_before_it_formed_its_own(continued: tuple[Live, Zombie]) -> None:
    _, zombie = continued
    assert zombie.listed >= 7
    assert zombie.left == 0


def test_the_log_of_both_is_one_chain_and_the_run_has_the_golden_bits(
    golden: Path, continued: tuple[Live, Zombie]
) -> None:
    live, zombie = continued
    assert zombie.head > zombie.head_before
    log = RunLog(bits.run_store(live.place), None)
    assert log.verify(needed_after=0, deep=True) == []
    assert_equal_runs(live.place, golden)
    await_nothing_left(live.place)
