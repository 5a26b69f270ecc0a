"""What recoveries cost: by hand, with a clock that the test moves."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from linckia_trainer.control.server import prometheus_text
from linckia_trainer.groups.replace import Parts
from linckia_trainer.log.recoveries import Recovery
from linckia_trainer.metrics import names
from linckia_trainer.metrics.recovery import Costs, effective_ratio, recovery_metrics, totals
from linckia_trainer.metrics.summary import render_summary, summarize


class Now:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def recovery(group="policy", kind="death", **seconds):
    role = group.partition("-")[0]
    return Recovery(group, role, 1, 2, kind, "it died", 7, "update", 1, 1e9, sum(seconds.values()), seconds)


def wait_for_a_group(now, costs, seconds, replay):
    parts = Parts({"replay": 1.0})  # of the try before
    with costs.standing_still(parts):
        now.seconds += seconds
        parts.seconds["replay"] += replay


def test_a_row_holds_what_its_step_lost_and_nothing_else():
    now = Now()
    costs = Costs(now)
    now.seconds += 10
    assert costs.row() == {}
    wait_for_a_group(now, costs, 4.0, replay=1.5)
    costs.generated_again += 3
    assert costs.row() == {names.SECONDS_STOOD_STILL: 4.0, names.SECONDS_REPLAYED: 1.5, names.GENERATED_AGAIN: 3.0}
    assert costs.row() == {}
    with costs.standing_still():
        now.seconds += 2
    assert costs.row() == {names.SECONDS_STOOD_STILL: 2.0}
    assert names.unknown([names.SECONDS_STOOD_STILL, names.SECONDS_REPLAYED, names.GENERATED_AGAIN]) == []


def test_replay_counts_as_useful_or_as_lost():
    now = Now()
    costs = Costs(now)
    assert costs.ratios() == {"useful": 1.0, "lost": 1.0}
    now.seconds += 12
    wait_for_a_group(now, costs, 8.0, replay=3.0)
    assert costs.ratios() == pytest.approx({"useful": 1 - 5 / 20, "lost": 1 - 8 / 20})
    assert effective_ratio(1, 5) == 0.0


def test_waiting_counts_when_it_ends_in_an_error():
    now = Now()
    costs = Costs(now)

    def wait():
        with costs.standing_still():
            now.seconds += 3
            raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        wait()
    assert costs.stood_still == 3.0


def test_recoveries_by_role_cause_result_and_part_reach_prometheus():
    found = totals(
        [
            recovery(load=2.0, fence=0.5),
            recovery("rollout-0", "hang", load=3.0),
            recovery("rollout-1", "hang", load=4.0),
        ],
        ["critic"],
    )
    text = prometheus_text({"run": "sort", "recovery_metrics": found})
    samples = {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples == {
        ("linckia_recoveries_total", "death", "healed", "policy"): 1,
        ("linckia_recoveries_total", "hang", "healed", "rollout"): 2,
        ("linckia_recoveries_total", "budget", "given up", "critic"): 1,
        ("linckia_recovery_seconds_total", "load", "policy"): 2.0,
        ("linckia_recovery_seconds_total", "fence", "policy"): 0.5,
        ("linckia_recovery_seconds_total", "load", "rollout"): 7.0,
    }


def test_an_attempt_that_lost_nothing_says_so():
    class Healer:
        finished = ()
        unhealable = None
        costs = Costs(Now())

    text = prometheus_text({"run": "sort", "recovery_metrics": recovery_metrics(Healer())})
    assert 'linckia_trajectories_generated_again_total{run="sort"} 0.0' in text
    assert 'linckia_effective_training_time_ratio{replay="useful",run="sort"} 1.0' in text
    assert 'linckia_effective_training_time_ratio{replay="lost",run="sort"} 1.0' in text


def test_the_summary_tells_of_lost_time(tmp_path):
    rows = [
        {"step": 1, "attempt": 1, names.SECONDS_STEP: 10.0},
        {
            "step": 2, "attempt": 1, names.SECONDS_STEP: 30.0, names.SECONDS_STOOD_STILL: 12.0,
            names.SECONDS_REPLAYED: 2.0, names.GENERATED_AGAIN: 5.0,
        },
    ]  # fmt: skip
    found = summarize(rows, "sort", "runs/sort", "finished")
    assert (found.stood_still_seconds, found.generated_again) == (12.0, 5)
    assert found.effective_time_ratio == pytest.approx(1 - 10 / 40)
    assert found.effective_time_ratio_replay_lost == pytest.approx(1 - 12 / 40)
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_summary(found, tmp_path))
    assert "12s waited for lost groups, 5 answers generated again; 75.0% effective time (70.0% without" in capture.get()
