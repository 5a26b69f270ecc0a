"""``linckia chaos`` as a person types it, against a live run: it strikes, waits, and says what it cost."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.live import Live, assert_equal_runs, await_nothing_left, started

FAULTS = [  # of groups that a step cannot do without: the run does not end while the command waits
    ("kill", "policy/1", "update"),
    ("exit", "reward", "score"),
    ("corrupt-state", "critic", "score"),
    ("truncate-state", "policy/0", "sync"),
]


def chaos(place: Path, fault: str, target: str, *options: str) -> tuple[int, Any]:
    """(exit code, report) of the command."""
    command = [
        str(Path(sys.executable).with_name("linckia")),
        "chaos",
        place.name,
        "--fault",
        fault,
        "--target",
        target,
    ]
    done = subprocess.run([*command, *options, "--json"], cwd=place, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@pytest.fixture(scope="module")
def struck(work: Path, golden: Path) -> Iterator[tuple[Live, list[Any]]]:
    """A run that was struck with each fault, and the reports."""
    live = started(work, "chaos")
    try:
        live.await_view(lambda view: view["step"] >= 2, "two steps")
        reports = [chaos(live.place, fault, target, "--stage", stage) for fault, target, stage in FAULTS]
        assert live.finish() == 0, live.said()
        yield live, reports
    finally:
        live.kill()


def test_each_fault_is_healed_and_its_cost_said(struck: tuple[Live, list[Any]]) -> None:
    _, reports = struck
    for (fault, target, stage), (code, report) in zip(FAULTS, reports, strict=True):
        assert code == 0, report
        assert (report["fault"], report["target"].startswith(target), report["stage"]) == (fault, True, stage)
        assert report["problems"] == []
        assert 0 <= report["found_after_seconds"] < report["healed_after_seconds"] < 120
        assert report["seconds_by_part"].keys() >= {"fence", "place", "start", "load"}


def test_the_run_ends_with_the_bits_of_one_that_was_never_struck(golden: Path, struck: tuple[Live, list[Any]]) -> None:
    live, _ = struck
    assert_equal_runs(live.place, golden)
    await_nothing_left(live.place)


def test_a_run_that_has_ended_cannot_be_struck(struck: tuple[Live, list[Any]]) -> None:
    live, _ = struck
    code, said = chaos(live.place, "kill", "policy")
    assert code == 2
    assert "no controller of this run answers" in said
