"""A run that is stopped while it starts, in each of the ways there are: it ends as stopped, and nothing of it is left."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from local import tiny

from linckia.api.access import find_token, read_run_file
from linckia.api.names import TOKEN_HEADER
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.store import Store

NAME = "early"
SECONDS = 240
ELSEWHERE = "import socket; socket.gethostname = lambda: 'another-host'; from linckia.cli.main import main; main()"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_config(tmp_path_factory.mktemp("early"), NAME, run={"steps": 100}, rollout={"engines": 1})


def wait_for_start(config: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the control API, once an attempt is claimed and its groups are being started."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, (config.parent / "output.txt").read_text()[-3000:]
        file = read_run_file(config.parent / "runs" / NAME)
        if file is not None and file.pid == process.pid and len(psutil.Process(process.pid).children()) > 1:
            return file.api_address
        time.sleep(0.05)
    raise AssertionError("it did not start")


def stage(address: str) -> str:
    headers = {TOKEN_HEADER: find_token(NAME) or ""}
    return str(httpx.get(f"http://{address}/v1/run", headers=headers, timeout=30).json()["stage"])


def interrupt(config: Path, process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)


def terminate(config: Path, process: subprocess.Popen[bytes]) -> None:
    process.terminate()


def linckia_stop(config: Path, process: subprocess.Popen[bytes]) -> None:
    subprocess.run([tiny.command(config)[0], "stop", NAME], cwd=config.parent, check=True, timeout=SECONDS)


@pytest.mark.parametrize("stop", [interrupt, terminate, linckia_stop])
def test_a_run_stopped_while_it_starts(config: Path, stop: Callable[[Path, subprocess.Popen[bytes]], None]) -> None:
    folder = config.parent
    with (folder / "output.txt").open("wb") as log:
        process = subprocess.Popen(tiny.command(config), cwd=folder, stdout=log, stderr=log)
    try:
        assert stage(wait_for_start(config, process)) == "start"  # the witness that the loop had not begun
        family = psutil.Process(process.pid).children(recursive=True)
        stop(config, process)
        assert process.wait(timeout=SECONDS) == 0, (folder / "output.txt").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert gone
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    store = Store(str(folder / "runs" / NAME))
    newest = attempts.latest(store)
    assert newest is not None
    ended = attempts.outcome(store, newest.attempt)
    assert ended is not None
    assert (ended.outcome, ended.cause) == ("stopped", "")
    assert RunLog(store, None).head() == 0
    assert "Traceback" not in (folder / "output.txt").read_text()
    listed = subprocess.run(
        [tiny.command(config)[0], "status", "--json"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert [row["state"] for row in json.loads(listed.stdout)] == ["stopped"]


def test_a_start_on_another_host_is_refused_while_the_run_lives(config: Path) -> None:
    """The second process takes itself to be on another host: it can see the first by nothing but its signs."""
    with (config.parent / "output.txt").open("wb") as log:
        process = subprocess.Popen(tiny.command(config), cwd=config.parent, stdout=log, stderr=log)
    try:
        wait_for_start(config, process)
        second = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, "train", str(config), "--quiet"],
            cwd=config.parent, capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert process.poll() is None  # the witness that it lived all the while
        process.terminate()
        assert process.wait(timeout=SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert second.returncode == 2, second.stderr[-3000:]
    assert "of this run is alive" in second.stderr
