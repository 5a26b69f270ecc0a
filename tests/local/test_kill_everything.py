"""SIGKILL of everything in each stage, one run struck six times in turn: it ends with the bits of a run never killed."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from local import bits, tiny

from linckia.api.access import find_token, read_run_file
from linckia.api.names import TOKEN_HEADER
from linckia_trainer.log.chain import RunLog
from linckia_trainer.metrics.sinks import read_rows

STAGES = ("generate", "score", "record", "update", "sync", "save")
STEPS = 14
START_SECONDS = 240
STARTED: list[subprocess.Popen[bytes]] = []


@dataclass
class Struck:
    """What was seen when everything was killed: the witness that the strike hit live work in the stage."""

    stage: str
    step: int
    head: int
    processes: int


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Node memory lies in real shared memory, as in production, in a folder of its own.
    folder = tmp_path_factory.mktemp("kill")
    memory = Path("/dev/shm", f"linckia-test-{os.getpid()}")
    yield folder
    for process in STARTED:
        tiny.kill_tree(process)
    shutil.rmtree(memory, ignore_errors=True)


def config_of(work: Path, name: str) -> Path:
    return tiny.write_config(
        work / name, name, storage={"node_memory_dir": f"/dev/shm/linckia-test-{os.getpid()}/{name}", "spool_seconds": 0,
                                    "run_directory": {"every": 3, "keep": 2}}
    )  # fmt: skip


def start(work: Path, config: Path) -> subprocess.Popen[bytes]:
    STARTED.append(tiny.start(work, config))
    return STARTED[-1]


def strike(work: Path, config: Path, name: str, stage: str, not_before: int) -> Struck:
    """Start the run and kill everything when its control API says that it is in ``stage`` at or after ``not_before``."""
    process = start(work, config)
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client() as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, (work / "output.txt").read_text()[-3000:]
            file = read_run_file(work / "runs" / name)
            if file is None or file.pid != process.pid:
                time.sleep(0.2)
                continue
            view = client.get(
                f"http://{file.api_address}/v1/run", headers={TOKEN_HEADER: find_token(name) or ""}
            ).json()
            if view["stage"] == stage and view["step"] >= not_before:
                return Struck(view["stage"], view["step"], view["log_head"], tiny.kill_tree(process))
    tiny.kill_tree(process)
    raise AssertionError(f"never seen in stage {stage}")


def finish(work: Path, config: Path) -> None:
    process = start(work, config)
    assert process.wait(timeout=START_SECONDS) == 0, (work / "output.txt").read_text()[-3000:]


@pytest.fixture(scope="module")
def golden(work: Path) -> Path:
    config = config_of(work, "golden")
    finish(work / "golden", config)
    return work / "golden"


@pytest.fixture(scope="module")
def struck(work: Path) -> tuple[Path, list[Struck]]:
    config = config_of(work, "struck")
    place = work / "struck"
    strikes: list[Struck] = []
    for number, stage in enumerate(STAGES):
        strikes.append(strike(place, config, "struck", stage, not_before=2 * number + 1))
        if stage == "sync":  # this time the machine's memory is lost too: back to the run directory, and more replay
            assert list(Path(f"/dev/shm/linckia-test-{os.getpid()}/struck").glob("struck-*/state/policy/*"))
            shutil.rmtree(f"/dev/shm/linckia-test-{os.getpid()}/struck")
    finish(place, config)
    return place, strikes


def test_every_strike_hit_live_work_in_its_stage(struck: tuple[Path, list[Struck]]) -> None:
    _, strikes = struck
    assert [one.stage for one in strikes] == list(STAGES)
    assert all(one.processes >= 8 for one in strikes)  # controller, Ray, two ranks, critic, reference, reward, engines
    steps = [one.step for one in strikes]
    assert steps == sorted(steps)
    assert steps[-1] <= STEPS


def test_records_are_the_same_bytes(golden: Path, struck: tuple[Path, list[Struck]]) -> None:
    place, _ = struck
    assert bits.payload_hashes(place) == bits.payload_hashes(golden)
    assert bits.log_hashes(place) == bits.log_hashes(golden)
    ours = RunLog(bits.run_store(place), None)
    assert ours.head() == STEPS
    assert ours.verify(needed_after=0, deep=True) == []


@pytest.mark.parametrize(("group", "ranks"), [("policy", 2), ("critic", 1)])
def test_weights_and_optimizer_are_the_same_bits(
    golden: Path, struck: tuple[Path, list[Struck]], group: str, ranks: int
) -> None:
    place, _ = struck
    wanted = bits.state_hashes(golden, group, STEPS)
    assert sorted(wanted) == list(range(ranks))
    assert bits.state_hashes(place, group, STEPS) == wanted


def test_no_trajectory_is_recorded_twice_or_lost(struck: tuple[Path, list[Struck]]) -> None:
    place, _ = struck
    keys = bits.trajectory_keys(place)
    assert len(keys) == len(set(keys))
    last = max(position for position, _ in keys)
    assert sorted(keys) == [(position, sample) for position in range(last + 1) for sample in range(4)]


def test_epochs_end_short_and_nothing_is_filled(golden: Path) -> None:
    log = RunLog(bits.run_store(golden), None)
    rows = [len(log.read(step).arrays["positions"]) for step in range(1, 7)]
    assert rows == [16, 16, 8, 16, 16, 8]  # 10 prompts an epoch, 4 a step, 4 samples each


def test_metrics_and_evaluations_are_those_of_the_golden_run(golden: Path, struck: tuple[Path, list[Struck]]) -> None:
    place, _ = struck
    wanted = {row["step"]: row for row in read_rows(golden / "runs" / "golden")}
    found = {row["step"]: row for row in read_rows(place / "runs" / "struck")}
    assert found.keys() == wanted.keys() == set(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        for name in ("reward/mean", "policy/loss", "critic/loss", "kl/coefficient", "rollout/log_prob_difference"):
            assert found[step][name] == wanted[step][name], (step, name)
    scored = [step for step, row in wanted.items() if "evaluation/score" in row]
    assert scored == [0, 7, 14]
    assert [found[step]["evaluation/score"] for step in scored] == [wanted[step]["evaluation/score"] for step in scored]


def test_nothing_is_left_running(golden: Path, struck: tuple[Path, list[Struck]]) -> None:
    left = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        if (process.info["environ"] or {}).get("PWD", "").startswith(str(golden.parent)) or str(golden.parent) in words:
            left.append(words)
    assert left == []
