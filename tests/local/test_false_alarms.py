"""The benchmark of the watcher, a few simulated hours of it: that it simulates what its file says, and what comes of it."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "false_alarms.py"
SPEC = yaml.safe_load(BENCHMARK.with_suffix(".yaml").read_text())


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


def test_healthy_runs_are_left_alone_and_hangs_are_found(benchmark: dict[str, Any]) -> None:
    spec = SPEC | {"hangs": {"share_of_steps": 0.5, "share_stopped": 0.5}}
    healthy = benchmark["Simulation"](spec, "healthy", 0, 4.0).run()
    assert healthy.steps > 5
    assert healthy.healthy_restarts == []
    assert healthy.closest[0] > 0, "it came near to a limit now and then, so it was looked at"
    found = benchmark["Simulation"](spec, "hangs", 1, 24.0).run()
    assert found.healthy_restarts == []
    in_time = [hang["seconds"] <= hang["allowed"] for hang in found.hangs]
    assert len(in_time) >= 5
    assert sum(in_time) >= 0.8 * len(in_time)


def test_a_limit_that_is_too_short_is_noticed(benchmark: dict[str, Any]) -> None:
    simulation = benchmark["Simulation"](SPEC | {"ticks": [20, 20], "first_time_factor": 50}, "healthy", 0, 2.0)
    keys = {"hang_floor_seconds": 15, "first_time_factor": 1}
    simulation.policy = type(simulation.policy)(type(simulation.policy.recovery)(**keys))
    assert simulation.run().healthy_restarts


def test_a_straggler_is_found(benchmark: dict[str, Any]) -> None:
    spec = SPEC | {"stragglers": {"from_hour": 1, "factors": [5]}, "groups": {"rollout-0": 1, "rollout-1": 1}}
    spec |= {"stages": {"generate": {"rollout": 60}, "save": {"policy": 30}}}
    result = benchmark["Simulation"](spec | {"groups": spec["groups"] | {"policy": 1}}, "stragglers", 1, 8.0).run()
    assert result.straggler == "rollout x5"
    assert result.found_after_hours is not None
    assert not result.reports


def test_the_quantile_is_that_of_the_mixture(benchmark: dict[str, Any]) -> None:
    plain = SPEC | {"slow_share": 0}
    assert benchmark["stage_quantile"](plain, 60) == pytest.approx(60 * math.exp(3.0902), rel=1e-3)
    # One in a hundred is 20 times as long, and a tenth of those lie beyond exp(1.2816) times their median.
    assert benchmark["stage_quantile"](SPEC, 60) == pytest.approx(60 * 20 * math.exp(1.2816), rel=0.02)
