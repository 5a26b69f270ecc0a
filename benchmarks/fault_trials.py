"""Random faults in live runs: each trial strikes one and compares its end, bit for bit, with a run that was never struck.

One controller process holds warm groups; a trial is a run of its own on them: a new run directory, the trained groups taken
back to state 0, four steps. (Rather than one long run of which each trial strikes the next four steps: so a trial depends on
nothing but its seed, and one that goes wrong can be asked for again alone.) Before the trials the golden run is made, and made
again without a strike to show that the comparison is fair. A trial that hangs or ends different costs the warm groups: the rest
goes on in a fresh process. Trials of the controller (``--controller``: it is killed, or hangs and wakes up when it was
replaced) start ``linckia train`` for each life; they take far longer, so they are apart.

Prints one JSON line per trial, then a summary. Trial ``i`` of ``--seed S`` is drawn from seed ``S + i``: give ``--seed S+i
--trials 1`` to strike again.
"""

import argparse
import itertools
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = 4
START_SECONDS = 300  # a worker process: Ray, models, the golden run
TRIAL_SECONDS = 240  # a trial that takes longer hangs
USUAL_RECOVERY_SECONDS = 12.0
SIGNALS = {"kill": signal.SIGKILL, "exit": signal.SIGTERM, "hang": signal.SIGSTOP}
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", help="these instead, such as 5,17: trials that went wrong once")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further trial after that")
    parser.add_argument("--faults", default="kill,exit,hang", help=f"of {', '.join(SIGNALS)}")
    parser.add_argument("--controller", action="store_true", help="kill or stop the controller instead of members")
    parser.add_argument("--append", type=Path, help="append the trials' lines to this file")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON too")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests")]  # the runs that are struck are those of the tests
    numbers = range(options.seed, options.seed + options.trials)
    seeds = [int(one) for one in options.seeds.split(",")] if options.seeds else list(numbers)
    if options.worker is not None:
        import fault_trials_worker

        fault_trials_worker.work(options.worker, seeds, options.faults.split(","))
        return
    head = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(head, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="linckia-trials-", dir=_roomy()) as folder:
        lines = []
        for line in trials(options, seeds, Path(folder)):
            line["commit"] = commit
            lines.append(line)
            print(json.dumps(line), flush=True)
            if options.append is not None:
                with options.append.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    found = summarize(lines)
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))
    sys.exit(1 if found["different"] or found["hung"] or found["failed"] else 0)


def trials(options: argparse.Namespace, seeds: list[int], folder: Path) -> Iterator[Line]:
    """Every trial's line, from as many worker processes as it takes."""
    deadline = time.monotonic() + 60 * options.minutes
    if options.controller:
        import fault_trials_controller

        faults = options.faults.split(",")
        yield from fault_trials_controller.trials(folder, seeds, STEPS, faults, deadline)
        return
    while seeds and time.monotonic() < deadline:
        shutil.rmtree(folder / "work", ignore_errors=True)
        for line in worker(options, folder / "work", seeds, deadline):
            yield line
            seeds = seeds[1:]
            if line["result"] != "equal":
                break  # its groups stand nobody knows how


def worker(options: argparse.Namespace, folder: Path, seeds: list[int], deadline: float) -> Iterator[Line]:
    """The lines of one worker; the last is a trial that hung or failed, if one did."""
    command = [sys.executable, __file__, "--worker", str(folder), "--seeds", ",".join(map(str, seeds))]
    folder.mkdir(parents=True)
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [*command, "--faults", options.faults],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    read: queue.Queue[str] = queue.Queue()
    stdout = process.stdout
    threading.Thread(target=lambda: [read.put(text) for text in itertools.chain(stdout, [""])], daemon=True).start()
    try:
        left, ready, limit = list(seeds), False, START_SECONDS
        while left and time.monotonic() < deadline:
            try:
                text = read.get(timeout=limit)
            except queue.Empty:
                yield {"seed": left[0], "result": "hung" if ready else "failed", "evidence": _stacks(process.pid)}
                return
            if not text:
                yield {"seed": left[0], "result": "failed", "evidence": (folder / "said.txt").read_text()[-3000:]}
                return
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            ready, limit = True, TRIAL_SECONDS
            if "ready" not in line:
                yield line
                left = left[1:]
    finally:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a worker, its Ray and its members."""
    from local import tiny

    tiny.kill_tree(process)


def summarize(lines: list[Line]) -> Line:
    """What the trials found, in a handful of numbers. Pure."""
    done = [line for line in lines if "seconds" in line]
    strikes = [strike for line in done for strike in line["strikes"]]
    parts: dict[str, list[float]] = {}
    for recovery in [recovery for line in done for recovery in line["recoveries"]]:
        for part, seconds in recovery["seconds"].items():
            parts.setdefault(part, []).append(seconds)
    results = Counter(line["result"] for line in lines)
    return {
        "trials": len(lines),
        "struck_live": sum(any(strike["live"] for strike in line["strikes"]) for line in done),
        "equal": results["equal"],
        "different": results["different"],
        "hung": results["hung"],
        "failed": results["failed"],
        "processes_left": sum(line["processes_left"] for line in done),
        "recorded_twice": sum(line["recorded_twice"] for line in done),
        "generated_again": sum(line["generated_again"] for line in done),
        "recoveries": sum(len(line["recoveries"]) for line in done),
        "median_trial_seconds": round(statistics.median([line["seconds"] for line in done]), 1) if done else None,
        "median_seconds_by_part": {part: round(statistics.median(found), 2) for part, found in sorted(parts.items())},
        "by_kind": dict(Counter(line["kind"] for line in done)),
        "by_fault": dict(Counter(strike["fault"] for strike in strikes if strike["live"])),
        "by_group": dict(Counter(strike["group"] for strike in strikes if strike["live"])),
        "by_stage": dict(Counter(strike["stage_before"] for strike in strikes if strike["live"])),
        "bad_seeds": [line["seed"] for line in lines if line["result"] != "equal"],
    }


def _stacks(pid: int) -> str:
    """Where a worker's threads stand; it writes them to its stderr on SIGUSR1."""
    try:
        said = Path(os.readlink(f"/proc/{pid}/fd/2"))
        os.kill(pid, signal.SIGUSR1)
    except OSError as error:
        return str(error)
    time.sleep(1)
    return said.read_text()[-6000:]


def _roomy() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    main()
