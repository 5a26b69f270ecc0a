import io
import json
import re
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.metrics import names
from linckia_trainer.metrics.curves import series, smooth
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.record import record_metrics
from linckia_trainer.metrics.sinks import FILE, Metrics, check_sinks, mark_rewind, read_rows
from linckia_trainer.metrics.summary import (
    duration,
    next_commands,
    read_summary,
    render_summary,
    summarize,
    write_summary,
)


def config(**metrics):
    return RunConfig.model_validate(
        {
            "run": {"name": "sort"},
            "model": {"path": "/m"},
            "data": {"train": {"file": "/p.jsonl"}},
            "reward": {"function": "/r.py:f"},
            "storage": {"options": {"secret": "hunter2"}},
            "metrics": {"tensorboard": False, **metrics},
        }
    )


def text_of(renderable):
    out = io.StringIO()
    Console(file=out, width=140).print(renderable)
    return out.getvalue()


# ---- names -------------------------------------------------------------------------------------------------------


def test_every_metric_has_a_meaning_and_families_are_found():
    assert all(metric.description for metric in names.METRICS.values())
    assert names.find("reward/part/exact").name == "reward/part/*"
    assert names.find(names.seconds("update")).unit == "s"
    assert names.unknown(["reward/mean", "reward/maen", "nothing"]) == ["reward/maen", "nothing"]
    assert names.prometheus_name("reward/part/a-b") == "linckia_reward_part_a_b"


# ---- a record's metrics ------------------------------------------------------------------------------------------


def test_metrics_of_a_record_by_hand():
    arrays = {
        "tokens": np.zeros((2, 4), np.int32),
        "prompt_lengths": np.array([1, 2], np.int32),
        "lengths": np.array([4, 3], np.int32),
        "loss_mask": np.array([[0, 1, 1, 1], [0, 0, 1, 0]], np.uint8),
        "rollout_log_probs": np.array([[9, -1, -2, -3], [9, 9, -1, 9]], np.float32),
        "old_log_probs": np.array([[0, -1, -2.5, -3], [0, 0, -2, 0]], np.float32),
        "reference_log_probs": np.array([[5, -2, -3.5, -3], [5, 5, -2, 5]], np.float32),
        "rewards": np.array([1.0, 0.0], np.float32),
        "reward_parts": np.array([[1.0, 0.5], [0.0, 0.5]], np.float32),
        "finished": np.array([1, 0], np.uint8),
    }
    values = record_metrics(arrays, kl_coefficient=0.05, epoch=2, part_names=("exact", "form"))
    assert values == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/part/exact": 0.5,
        "reward/part/form": 0.5,
        "rollout/answer_tokens": 2.0,
        "rollout/prompt_tokens": 1.5,
        "rollout/finished": 0.5,
        "rollout/log_prob_difference": pytest.approx((0.5 + 1.0) / 4),
        "rollout/log_prob_difference_max": 1.0,
        "kl/coefficient": 0.05,
        "kl/reference": pytest.approx((1.0 + 1.0) / 4),
        "step/rows": 2.0,
        "step/tokens": 7.0,
        "step/epoch": 2.0,
    }
    assert names.unknown(values) == []
    del arrays["reference_log_probs"]
    arrays["loss_mask"][:] = 0
    empty = record_metrics(arrays, 0.0, 0)
    assert empty["rollout/log_prob_difference"] == 0.0
    assert names.KL not in empty


# ---- sinks -------------------------------------------------------------------------------------------------------


def test_rows_are_read_back_last_wins(tmp_path):
    first = Metrics(tmp_path, config(), attempt=1, clock=lambda: 10.0)
    first.log(0, {names.EVALUATION_SCORE: 0.1})
    first.log(1, {names.REWARD: 0.2, names.KL: float("nan")})
    first.log(2, {names.REWARD: 0.3})
    first.close()
    second = Metrics(tmp_path, config(), attempt=2, clock=lambda: 20.0)
    second.log(2, {names.REWARD: 0.4})
    second.log(2, {names.EVALUATION_SCORE: 0.5})
    first.log(2, {names.REWARD: 0.9, names.KL: 0.01})  # a stopped attempt that came back: it only adds
    assert read_rows(tmp_path) == [
        {"step": 0, "attempt": 1, "time": 10.0, names.EVALUATION_SCORE: 0.1},
        {"step": 1, "attempt": 1, "time": 10.0, names.REWARD: 0.2, names.KL: None},
        {"step": 2, "attempt": 2, "time": 20.0, names.REWARD: 0.4, names.EVALUATION_SCORE: 0.5, names.KL: 0.01},
    ]


def test_a_line_cut_off_by_a_crash_harms_no_other(tmp_path):
    Metrics(tmp_path, config(), attempt=1).log(1, {names.REWARD: 0.2})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 2, "att')
    Metrics(tmp_path, config(), attempt=2).log(2, {names.REWARD: 0.3})
    assert [(row["step"], row["attempt"]) for row in read_rows(tmp_path)] == [(1, 1), (2, 2)]


def test_rewound_rows_no_longer_count(tmp_path):
    mark_rewind(tmp_path, 0)  # without metrics there is nothing to mark
    assert read_rows(tmp_path) == []
    metrics = Metrics(tmp_path, config(), attempt=1)
    for step in (1, 2, 3):
        metrics.log(step, {names.REWARD: 0.1})
    mark_rewind(tmp_path, 1)
    Metrics(tmp_path, config(), attempt=2).log(2, {names.REWARD: 0.2})
    assert [(row["step"], row["attempt"]) for row in read_rows(tmp_path)] == [(1, 1), (2, 2)]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="reward/maen"):
        Metrics(tmp_path, config(), attempt=1).log(1, {"reward/maen": 0.1})


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path, caplog):
    metrics = Metrics(tmp_path / "run", config(), attempt=1)
    (tmp_path / "run").rmdir()
    metrics.log(1, {names.REWARD: 0.1})
    metrics.log(2, {names.REWARD: 0.1})
    assert [record.getMessage()[:24] for record in caplog.records] == ["metrics are not written:"]


def test_tensorboard_reads_what_we_write_and_drops_what_was_replayed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, steps, reward in ((1, (1, 2, 3), 0.1), (2, (2, 3), 0.2)):
        metrics = Metrics(tmp_path, config(tensorboard=True), attempt, clock=lambda attempt=attempt: float(attempt))
        for step in steps:
            metrics.log(step, {names.REWARD: reward})
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars(names.REWARD)]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.2)]


def test_wandb_missing_is_found_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_sinks(config(wandb_project="p"))
    check_sinks(config())


def test_wandb_gets_rows_and_no_secrets(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )

    def init(**arguments):
        calls.append(arguments)
        return run

    fake = types.ModuleType("wandb")
    fake.init = init
    fake.__spec__ = types.SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics = Metrics(tmp_path, config(wandb_project="p"), attempt=1)
    metrics.log(1, {names.REWARD: 0.1})
    metrics.close()
    assert (calls[0]["project"], calls[0]["id"], calls[0]["resume"]) == ("p", "sort", "allow")
    assert "hunter2" not in json.dumps(calls[0]["config"])
    assert calls[1:] == [(1, {names.REWARD: 0.1}), "finish"]


# ---- summary, curves ---------------------------------------------------------------------------------------------

ROWS = [
    {"step": 0, "attempt": 1, names.EVALUATION_SCORE: 0.1, names.SECONDS_EVALUATE: 1.0},
    {"step": 1, "attempt": 1, names.REWARD: 0.2, names.SECONDS_STEP: 2.0, "seconds/generate": 1.5, names.TOKENS: 100},
    {
        "step": 2, "attempt": 2, names.REWARD: 0.4, names.SECONDS_STEP: 2.0, "seconds/generate": 1.0, names.TOKENS: 300,
        names.EVALUATION_SCORE: 0.8, names.SECONDS_EVALUATE: 1.0, names.KL: None,
    },
    {"step": 3, "attempt": 2, names.REWARD: 0.5, names.EVALUATION_SCORE: 0.7},
]  # fmt: skip


def test_summary_by_hand(tmp_path):
    summary = summarize(ROWS, "sort", "s3://b/sort", "finished", start_seconds=30)
    assert (summary.eval_before, summary.eval_after, summary.eval_max) == (0.1, 0.7, 0.8)
    assert (summary.reward_first, summary.reward_last) == (0.2, 0.5)
    assert (summary.steps, summary.attempts, summary.tokens) == (3, 2, 400)
    assert (summary.seconds, summary.start_seconds, summary.tokens_per_second) == (6.0, 30, 100.0)
    assert summary.seconds_by_stage["generate"] == 2.5
    assert summary.seconds_by_stage["evaluate"] == 2.0
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    text = text_of(render_summary(summary, tmp_path))
    for words in (
        "sort: finished",
        "0.100 -> 0.700 (best 0.800)",
        "3 in 6s, attempt 2",
        "linckia samples sort --step 3",
    ):
        assert words in text


def test_what_to_type_next_is_whole_lines_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = summarize(ROWS, "sort_digits_with_grpo-seed12", "u", "finished")
    console = Console(file=io.StringIO(), width=80)
    console.print(render_summary(summary, tmp_path / "runs" / summary.run))
    lines = [line.strip() for line in console.file.getvalue().partition("Try next:")[2].splitlines()]
    for command, meaning in next_commands(summary, tmp_path / "runs" / summary.run):
        assert lines[lines.index(command) + 1] == meaning
    assert f"tensorboard --logdir runs/{summary.run}" in lines


def test_summary_of_nothing(tmp_path):
    summary = summarize([], "sort", "runs/sort", "failed")
    assert (summary.steps, summary.eval_before, summary.tokens_per_second) == (0, None, 0.0)
    assert "no held-out data" in text_of(render_summary(summary, tmp_path))
    assert read_summary(tmp_path) is None
    assert summarize(ROWS[1:], "sort", "u", "finished").eval_before is None
    assert all(command for command, _ in next_commands(summary, tmp_path))


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_series_and_smoothing():
    assert series(ROWS, names.KL) == ([], [])
    assert series(ROWS, names.REWARD) == ([1, 2, 3], [0.2, 0.4, 0.5])
    assert smooth([3.0, 3.0]) == pytest.approx([3.0, 3.0])
    assert smooth([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 0.5 / 0.75])


# ---- progress ----------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def run_progress(console, clock, **arguments):
    with RunProgress("sort", 10, console=console, clock=clock, **arguments) as progress:
        progress.message("starting")
        progress.evaluated(0, 0.125, 32)
        for step in (1, 2, 3):
            progress.stage(step, "generate", 3, 8)
            clock.now += 2
            values = {names.REWARD: step / 10, names.KL: 0.01, names.TOKENS_PER_SECOND: 1234.5, names.SECONDS_STEP: 2.0}
            progress.step(step, values)
    return progress


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    progress = run_progress(Console(file=out, width=40), Clock())
    lines = out.getvalue().splitlines()
    assert lines == [
        "starting",
        "held-out score after step 0: 0.125 (32 answers)",
        "step 1/10  reward 0.100  kl 0.0100  tokens/s 1,234  2.00 s/step  held-out 0.125",
        "step 2/10  reward 0.200  kl 0.0100  tokens/s 1,234  2.00 s/step  held-out 0.125  16s left",
        "step 3/10  reward 0.300  kl 0.0100  tokens/s 1,234  2.00 s/step  held-out 0.125  14s left",
    ]
    assert progress.time_left() == 14.0


def test_the_score_of_an_earlier_attempt_is_shown_until_the_next():
    out = io.StringIO()
    with RunProgress("sort", 10, console=Console(file=out, width=40), clock=Clock()) as progress:
        progress.remember(0.5)
        progress.step(4, {names.REWARD: 0.25})
        progress.evaluated(4, 0.625, 32)
        progress.step(5, {names.REWARD: 0.25})
    assert [re.findall(r"held-out \S+", line) for line in out.getvalue().splitlines() if line.startswith("step")] == [
        ["held-out 0.500"], ["held-out 0.625"],
    ]  # fmt: skip


def test_a_live_line_on_a_terminal():
    out = io.StringIO()
    run_progress(Console(file=out, width=100, force_terminal=True, color_system=None), Clock())
    for words in ("sort", "3/10", "generate 3/8", "14s left", "reward 0.300", "held-out 0.125"):
        assert words in out.getvalue()
    assert "step 3/10" not in out.getvalue()


def test_quiet_says_nothing():
    out = io.StringIO()
    run_progress(Console(file=out, quiet=True), Clock(), quiet=True)
    assert out.getvalue() == ""


def test_a_message_may_hold_what_looks_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from linckia_trainer.metrics.progress import RunProgress

    RunProgress("run", 3).message("KeyError: '[/no] such [red]thing'")
    assert "[/no] such [red]thing" in capsys.readouterr().out
