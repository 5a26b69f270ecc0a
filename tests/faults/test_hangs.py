"""SIGSTOP of one member at a time: nothing fails, nothing dies, and the watcher finds who stands still.

The run keeps standbys, so what takes a stopped member's place was there before it was stopped.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from faults.live import Live, assert_equal_runs, await_nothing_left, note_strikes, pid_of, recoveries, stands, started

from linckia_trainer.log.process import start_time

HEALED_SECONDS = 120
WATCHED = {"watch_seconds": 1, "hang_floor_seconds": 5, "first_time_factor": 5, "standbys": 1}

# (group, rank, stage)
STRIKES = [
    ("policy", 1, "update"),
    ("rollout-0", 0, "generate"),
    ("reward", 0, "score"),
    ("critic", 0, "update"),
    ("rollout-1", 0, "sync"),
    ("reference", 0, "score"),
]


@dataclass
class Strike:
    """A stopped member: ``stopped`` and ``gone`` are the witnesses."""

    group: str
    stage: str
    step: int
    generation: int
    stopped: bool
    gone: bool
    standby: int  # standbys of the group that waited when it was struck


@pytest.fixture(scope="module")
def struck(work: Path, golden: Path) -> Iterator[tuple[Path, list[Strike]]]:
    live = started(work, "hangs", recovery=WATCHED)
    try:
        strikes: list[Strike] = []
        for group, rank, stage in STRIKES:
            strikes.append(strike(live, group, rank, stage, strikes[-1].step + 1 if strikes else 3))
        assert live.finish() == 0, live.said()
        note_strikes("hang", live.place, [(one.group, one.stage, one.generation) for one in strikes])
        yield live.place, strikes
    finally:
        live.kill()


def strike(live: Live, group: str, rank: int, stage: str, not_before: int) -> Strike:
    view = live.await_view(
        lambda view: (
            view["stage"] == stage
            and view["step"] >= not_before
            and stands(view, group)
            and view["groups"][group]["standbys"] == 1
        ),
        f"{group} in {stage}",
    )
    pid, generation = pid_of(view, group, rank), view["groups"][group]["generation"]
    os.kill(pid, signal.SIGSTOP)
    stopped = is_stopped(pid)
    live.await_view(lambda view: view["groups"][group]["generation"] > generation, f"{group} healed", HEALED_SECONDS)
    return Strike(
        group, stage, view["step"], generation, stopped, start_time(pid) is None, view["groups"][group]["standbys"]
    )


def is_stopped(pid: int) -> bool:
    """Whether the process stands; a signal takes a moment to arrive at a process on another core."""
    deadline = time.monotonic() + 2
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_every_strike_stopped_a_member_in_its_stage(struck: tuple[Path, list[Strike]]) -> None:
    _, strikes = struck
    assert [(one.group, one.stage) for one in strikes] == [(group, stage) for group, _, stage in STRIKES]
    assert [one.group for one in strikes if not one.stopped] == []
    assert [one.group for one in strikes if not one.gone] == []


def test_each_was_found_by_the_watcher_and_a_standby_took_its_place(struck: tuple[Path, list[Strike]]) -> None:
    place, strikes = struck
    found = {one["group"]: one for one in recoveries(place)}
    assert sorted(found) == sorted(one.group for one in strikes)
    assert all(one["kind"] == "hang" for one in found.values())
    assert all(one.standby == 1 for one in strikes)
    assert all(one["seconds"]["start"] < 2 for one in found.values())  # no process had to start and import


def test_the_run_ends_with_the_golden_bits(golden: Path, struck: tuple[Path, list[Strike]]) -> None:
    assert_equal_runs(struck[0], golden)
    await_nothing_left(struck[0])
