"""Fault trials that once went wrong, struck again from their seeds."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = {
    5: "policy and an engine die together in the sync: the next policy waited for the dead engine",
}


def test_what_went_wrong_once_ends_like_a_run_that_was_never_struck() -> None:
    seeds = ",".join(map(str, SEEDS))
    command = [
        sys.executable,
        str(ROOT / "benchmarks/fault_trials.py"),
        "--seeds",
        seeds,
        "--faults",
        "kill,exit",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["seed"]: line["result"] for line in lines[:-1]} == dict.fromkeys(SEEDS, "equal"), done.stdout
    assert all(strike["live"] for line in lines[:-1] for strike in line["strikes"])
    assert lines[-1]["processes_left"] == 0
