"""What the fault trials strike, and how their lines are summed up."""

import sys
from pathlib import Path

import pytest

RANKS = {"policy": 2, "critic": 1, "reward": 1, "rollout-0": 1, "rollout-1": 1}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield
    for name in ("fault_plan", "fault_trials"):
        sys.modules.pop(name, None)


def test_a_seed_draws_the_same_plan_again():
    import fault_plan

    plans = [fault_plan.draw(seed, RANKS, 4, ("kill", "exit")) for seed in range(50)]
    assert plans == [fault_plan.draw(seed, dict(reversed(RANKS.items())), 4, ("kill", "exit")) for seed in range(50)]
    assert len(set(plans)) == 50


def test_every_fault_group_rank_stage_step_and_kind_is_drawn():
    import fault_plan

    plans = [fault_plan.draw(seed, RANKS, 4, ("kill", "exit")) for seed in range(400)]
    strikes = [strike for plan in plans for strike in plan.strikes]
    assert {(one.group, one.rank) for one in strikes} == {(name, i) for name, n in RANKS.items() for i in range(n)}
    assert {one.stage for one in strikes} == set(fault_plan.STAGES)
    assert {one.step for one in strikes} == {0, 1, 2, 3, 4}
    assert {one.fault for one in strikes} == {"kill", "exit"}
    assert {plan.kind for plan in plans} == set(fault_plan.KINDS)
    assert all(0 <= one.share < 1 for one in strikes)


def test_two_at_once_hit_two_groups_at_one_moment_and_healing_strikes_come_second():
    import fault_plan

    plans = [fault_plan.draw(seed, RANKS, 4, ("kill",)) for seed in range(200)]
    for plan in plans:
        first, *others = plan.strikes
        assert not first.healing
        assert len(others) == (plan.kind != "one")
        for other in others:
            assert other.healing == (plan.kind == "while healing")
            if plan.kind == "two at once":
                assert other.group != first.group
                assert (other.step, other.stage, other.share) == (first.step, first.stage, first.share)
    again = [plan for plan in plans if plan.kind == "while healing"]
    assert any(plan.strikes[0].group == plan.strikes[1].group for plan in again)
    assert any(plan.strikes[0].group != plan.strikes[1].group for plan in again)


def test_places_in_the_loop_are_in_order():
    import fault_plan

    loop = [
        (0, "recover"),
        (0, "evaluate"),
        (1, "generate"),
        (1, "save"),
        (2, "generate"),
        (4, "update"),
        (4, "evaluate"),
    ]
    assert [fault_plan.moment(*place) for place in loop] == sorted(fault_plan.moment(*place) for place in loop)
    assert fault_plan.moment(0, "start") < fault_plan.moment(0, "recover")


def test_a_summary_by_hand():
    import fault_trials

    def line(seed, result="equal", live=True, seconds=10.0):
        strike = {"fault": "kill", "group": "policy", "stage_before": "update", "live": live}
        return {
            "seed": seed, "kind": "one", "result": result, "seconds": seconds, "strikes": [strike], "generated_again": 2,
            "recoveries": [{"group": "policy", "seconds": {"load": seconds / 2}}], "processes_left": 0, "recorded_twice": 0,
        }  # fmt: skip

    found = fault_trials.summarize(
        [line(1), line(2, "different", seconds=30.0), line(3, live=False, seconds=20.0), {"seed": 4, "result": "hung"}]
    )
    assert (found["trials"], found["equal"], found["different"], found["hung"], found["failed"]) == (4, 2, 1, 1, 0)
    assert (found["struck_live"], found["generated_again"], found["recoveries"]) == (2, 6, 3)
    assert (found["median_trial_seconds"], found["median_seconds_by_part"]) == (20.0, {"load": 10.0})
    assert (found["by_group"], found["bad_seeds"]) == ({"policy": 2}, [2, 4])
    assert fault_trials.summarize([])["median_trial_seconds"] is None
