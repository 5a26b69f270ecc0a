"""One GRPO run in a bucket, stopped in the middle and gone on with, looked at from every command; then forked."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import httpx
import pytest
import torch
from local import tiny
from local.s3_server import s3_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from linckia.api.access import find_token, read_run_file
from linckia.api.names import TOKEN_HEADER
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.store import Store
from linckia_trainer.metrics.sinks import read_rows

STEPS = 60
NAME = "bucket"
START_SECONDS = 240
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@dataclass
class Place:
    folder: Path
    config: Path
    options: dict[str, str]

    @property
    def store(self) -> Store:
        return Store(f"s3://runs/{NAME}", self.options)

    def linckia(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command of the command line in the run's folder."""
        program = tiny.command(self.config)[0]
        return subprocess.run(
            [program, *words], cwd=self.folder, capture_output=True, text=True, check=False, timeout=START_SECONDS
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with s3_server() as endpoint:
        yield make_place(tmp_path_factory.mktemp("whole"), endpoint)


def make_place(folder: Path, endpoint: str) -> Place:
    options = {"endpoint_url": endpoint, "key": "testing", "secret": "testing"}
    tiny.make_model(folder / "model", tied=False)
    config = tiny.write_config(
        folder,
        NAME,
        run={"dir": f"s3://runs/{NAME}", "steps": STEPS},
        algorithm={"name": "grpo", "epochs": 1, "kl": {"coefficient": 0.01, "where": "loss", "estimator": "k3"}},
        rollout={"engines": 1, "max_new_tokens": 6, "temperature": 0.8, "stop": ["=="]},
        policy={"num_gpus_per_node": 1, "zero_stage": 0, "mini_batch_size": 8, "micro_batch_size": 8},
        evaluation={"every": 30},
        storage={"options": options, "run_directory": {"every": 10, "keep": 2}, "node_memory": None},
    )
    fsspec.filesystem("s3", **options).mkdir("runs")
    return Place(folder, config, options)


@dataclass
class Seen:
    """What was found while the run was alive."""

    view: dict[str, object]
    without_token: int
    wrong_token: int
    checkpoint: int
    second_start: subprocess.CompletedProcess[str]
    exit_code: int
    head: int


def start(place: Place) -> subprocess.Popen[bytes]:
    with (place.folder / "output.txt").open("ab") as log:
        return subprocess.Popen(tiny.command(place.config), cwd=place.folder, stdout=log, stderr=log)


def wait_for_step(place: Place, process: subprocess.Popen[bytes], step: int) -> tuple[str, dict[str, object]]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, (place.folder / "output.txt").read_text()[-3000:]
        file = read_run_file(place.folder / "runs" / NAME)
        if file is not None and file.pid == process.pid:
            address = f"http://{file.api_address}"
            view = httpx.get(f"{address}/v1/run", headers={TOKEN_HEADER: find_token(NAME) or ""}).json()
            if view["step"] >= step:
                return address, view
        time.sleep(0.05)
    raise AssertionError("the run did not get there")


@pytest.fixture(scope="module")
def stopped(place: Place) -> Seen:
    """Started, looked at from outside, and stopped by ``linckia stop`` before its end."""
    process = start(place)
    try:
        address, view = wait_for_step(place, process, 2)
        second = place.linckia("train", str(place.config), "--quiet")
        without = httpx.get(f"{address}/v1/run").status_code
        wrong = httpx.get(f"{address}/v1/run", headers={TOKEN_HEADER: "guess"}).status_code
        checkpoint = httpx.post(f"{address}/v1/checkpoint", headers={TOKEN_HEADER: find_token(NAME) or ""}).status_code
        stop = place.linckia("stop", NAME)
        assert stop.returncode == 0, stop.stderr
        code = process.wait(timeout=START_SECONDS)
    finally:
        process.kill()
        process.wait()
    return Seen(view, without, wrong, checkpoint, second, code, RunLog(place.store, None).head())


@pytest.fixture(scope="module")
def finished(place: Place, stopped: Seen) -> Place:
    process = start(place)
    assert process.wait(timeout=START_SECONDS) == 0, (place.folder / "output.txt").read_text()[-3000:]
    return place


def test_a_live_run_shows_itself_to_whoever_has_the_token(stopped: Seen) -> None:
    assert stopped.view["run"] == NAME
    assert set(stopped.view["groups"]) == {"policy", "reference", "reward", "rollout-0"}  # type: ignore[call-overload]
    assert (stopped.without_token, stopped.wrong_token) == (401, 403)
    assert stopped.checkpoint == 202


def test_a_second_start_is_refused_while_the_run_lives(stopped: Seen) -> None:
    assert stopped.second_start.returncode == 2
    assert "--takeover" in stopped.second_start.stderr


def test_stop_ends_after_the_step_with_exit_code_0(place: Place, stopped: Seen) -> None:
    assert stopped.exit_code == 0
    assert 2 <= stopped.head < STEPS
    ended = attempts.outcome(place.store, 1)
    assert ended is not None
    assert ended.outcome == "stopped"


def test_the_same_command_goes_on_to_the_end(finished: Place, stopped: Seen) -> None:
    log = RunLog(finished.store, None)
    assert log.head() == STEPS
    assert log.verify(needed_after=0, deep=True) == []
    ended = attempts.outcome(finished.store, 2)
    assert ended is not None
    assert ended.outcome == "finished"
    rows = {row["step"]: row for row in read_rows(finished.folder / "runs" / NAME)}
    assert sorted(step for step, row in rows.items() if row.get("evaluation/score") is not None) == [0, 30, 60]
    assert all(abs(rows[step]["rollout/log_prob_difference"]) < 1e-4 for step in range(1, STEPS + 1))


def test_starting_a_finished_run_prints_its_summary(finished: Place) -> None:
    again = finished.linckia("train", str(finished.config))
    assert again.returncode == 0
    assert "finished" in again.stdout
    assert attempts.numbers(finished.store) == [1, 2]


def test_metrics_and_curves_are_copied_to_the_bucket(finished: Place) -> None:
    assert {"local/metrics.jsonl", "local/curves.png", "local/summary.json"} <= set(finished.store.list("local"))
    summary = json.loads(finished.store.get("local/summary.json"))
    assert summary["steps"] == STEPS
    assert b"testing" not in finished.store.get("attempts/1")  # the bucket's keys are not kept in the bucket


def test_commands_look_at_it_by_name_and_by_uri(finished: Place) -> None:
    for run in (NAME, str(finished.folder / "runs" / NAME)):
        shown = json.loads(finished.linckia("checkpoints", "list", run, "--json").stdout)
        assert {row["step"] for row in shown} == {50, 60}
        assert all(row["valid"] for row in shown)
    assert finished.linckia("checkpoints", "verify", NAME).returncode == 0
    samples = json.loads(finished.linckia("samples", NAME, "--step", "3", "--json").stdout)
    assert len(samples) == 8 or len(samples) == 16
    status = json.loads(finished.linckia("status", NAME, "--json").stdout)
    assert status["state"] == "finished"


def test_an_exported_checkpoint_loads_in_transformers(finished: Place) -> None:
    exported = finished.linckia("checkpoints", "export", NAME, "--to", "exported")
    assert exported.returncode == 0, exported.stderr
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "exported")
    before = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    tokens = torch.tensor([AutoTokenizer.from_pretrained(finished.folder / "exported")("sort 312=")["input_ids"]])
    with torch.no_grad():
        assert torch.isfinite(model(tokens).logits).all()
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_a_fork_starts_anew_from_the_newest_checkpoint(finished: Place) -> None:
    forked = subprocess.run(
        [*tiny.command(finished.config, "run.steps=2", "policy.optimizer.lr=0.0005", "--fork", "forked")],
        cwd=finished.folder, capture_output=True, text=True, check=False, timeout=START_SECONDS,
        env={**os.environ},
    )  # fmt: skip
    assert forked.returncode == 0, forked.stderr[-3000:]
    store = Store("s3://runs/forked", finished.options)
    log, source = RunLog(store, None), RunLog(finished.store, None)
    assert (log.head(), source.head()) == (2, STEPS)
    first = log.read(1)
    assert first.header.cursor_before == source.read(STEPS).header.cursor_after  # its prompts go on where they were
    assert abs(read_rows(finished.folder / "runs" / "forked")[1]["rollout/log_prob_difference"]) < 1e-4
    assert json.loads(store.get("fork.json"))["step"] == STEPS
