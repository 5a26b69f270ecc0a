"""SIGKILL of one member at a time, in every stage and of every role, in one live run: it ends with a golden run's bits.

The run is never started again: each loss is healed beside the work. What is struck, and that it was struck in its stage, is
read from the run's control API and from the recoveries it wrote down.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from faults.live import Live, assert_equal_runs, await_nothing_left, note_strikes, pid_of, recoveries, stands, started

from linckia.api.names import role_of
from linckia_trainer.log.process import start_time

HEALED_SECONDS = 120
SLOW_SECONDS = 3

# (group, rank, stage): every role, every stage, both ranks of the policy, both engines.
STRIKES = [
    ("rollout-0", 0, "generate"),
    ("policy", 1, "score"),
    ("reward", 0, "score"),
    ("policy", 0, "update"),
    ("critic", 0, "update"),
    ("reference", 0, "score"),
    ("rollout-1", 0, "sync"),
    ("policy", 1, "sync"),
    ("critic", 0, "save"),
    ("policy", 0, "generate"),  # nobody calls it then: found dead while it is idle
]


@dataclass
class Strike:
    """What was struck, and the witness that it lived and is gone."""

    group: str
    stage: str
    step: int
    pid: int
    lived: bool
    gone: bool
    generation: int
    healed: int  # the generation that took its place


@pytest.fixture(scope="module")
def struck(work: Path, golden: Path) -> Iterator[tuple[Path, list[Strike]]]:
    live = started(work, "struck")
    try:
        strikes: list[Strike] = []
        for group, rank, stage in STRIKES:
            strikes.append(strike(live, group, rank, stage, strikes[-1].step + 1 if strikes else 1))
        scale(live, 3)
        live.pace(SLOW_SECONDS)
        live.await_view(lambda view: view["groups"].get("rollout-2", {}).get("generation") == 1, "a third engine")
        live.pace(0)
        scale(live, 1)
        live.await_view(lambda view: set(view["groups"]).isdisjoint({"rollout-1", "rollout-2"}), "one engine left")
        assert live.finish() == 0, live.said()
        note_strikes("kill", live.place, [(one.group, one.stage, one.generation) for one in strikes])
        yield live.place, strikes
    finally:
        live.kill()


def strike(live: Live, group: str, rank: int, stage: str, not_before: int) -> Strike:
    """Kill a member in ``stage``; until its group is healed the steps are slow, so that few are used up."""
    view = live.await_view(
        lambda view: view["stage"] == stage and view["step"] >= not_before and stands(view, group),
        f"{group} in {stage}",
    )
    pid, generation = pid_of(view, group, rank), view["groups"][group]["generation"]
    lived = start_time(pid) is not None
    os.kill(pid, signal.SIGKILL)
    live.pace(SLOW_SECONDS)
    healed = live.await_view(
        lambda view: (
            view["groups"][group]["generation"] > generation and (stands(view, group) or role_of(group) == "rollout")
        ),
        f"{group} healed",
        HEALED_SECONDS,
    )
    live.pace(0)
    gone = not psutil.pid_exists(pid) or start_time(pid) is None
    return Strike(group, stage, view["step"], pid, lived, gone, generation, healed["groups"][group]["generation"])


def scale(live: Live, engines: int) -> None:
    answer = live.post("/v1/roles/rollout/scale", {"engines": engines})
    assert (answer.status_code, answer.json()["engines"]) == (202, engines)


def test_every_strike_hit_a_living_member(struck: tuple[Path, list[Strike]]) -> None:
    _, strikes = struck
    assert [(one.group, one.stage) for one in strikes] == [(group, stage) for group, _, stage in STRIKES]
    assert all(one.lived and one.gone and one.healed > one.generation for one in strikes)
    assert {one.stage for one in strikes} == {"generate", "score", "update", "sync", "save"}  # record calls no member


def test_each_loss_is_written_down_with_its_cost(struck: tuple[Path, list[Strike]]) -> None:
    place, strikes = struck
    found = recoveries(place)
    assert sorted(one["group"] for one in found) == sorted(one.group for one in strikes)
    assert all(one["kind"] == "death" and one["generation"] == one["generation_lost"] + 1 for one in found)
    assert all(one["seconds"].keys() >= {"fence", "place", "start", "load"} for one in found)


def test_the_run_ends_with_the_bits_of_one_that_was_never_struck(
    golden: Path, struck: tuple[Path, list[Strike]]
) -> None:
    assert_equal_runs(struck[0], golden)


def test_it_was_one_attempt_and_nothing_is_left_running(struck: tuple[Path, list[Strike]]) -> None:
    place, _ = struck
    assert [path.name for path in (place / "runs" / place.name / "attempts").glob("*") if path.suffix == ""] == ["1"]
    await_nothing_left(place)
