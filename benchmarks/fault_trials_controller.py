"""Fault trials of the controller: struck at a random moment, and the same command typed again. Each life is a process of its own."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fault_plan
from faults.live import Live, left_running
from local import bits, tiny

from linckia.api.process import start_time

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
LEFT_SECONDS = 15.0
STAGE_SECONDS = 0.3
REPLACED = 4  # the exit code of a controller that sees that a newer one has taken over


def trials(
    folder: Path, seeds: Sequence[int], steps: int, faults: Sequence[str], deadline: float
) -> Iterator[dict[str, Any]]:
    """A line for each trial, as those of the members; the golden run is made first."""
    golden = started(folder, "golden", steps)
    try:
        assert golden.finish() == 0, golden.said()
    finally:
        golden.kill()
    wanted = end_of(folder / "golden", steps)
    for one in seeds:
        if time.monotonic() >= deadline:
            return
        yield trial(folder, one, steps, [fault for fault in faults if fault in SIGNALS] or list(SIGNALS), wanted)


def trial(folder: Path, seed: int, steps: int, faults: Sequence[str], wanted: dict[str, Any]) -> dict[str, Any]:
    rolled = random.Random(seed)
    fault, stage = rolled.choice(list(faults)), rolled.choice(fault_plan.STAGES[:-1])
    step, share = (0 if stage == "recover" else rolled.randint(1, steps)), rolled.random()
    began = time.monotonic()
    first = started(folder, f"seed{seed}", steps)
    place = first.place
    second = None
    line: dict[str, Any] = {
        "seed": seed,
        "kind": "controller",
        "result": "equal",
        "recoveries": [],
        "generated_again": 0,
    }
    try:
        at = fault_plan.moment(step, stage)
        view = first.await_view(lambda view: fault_plan.moment(view["step"], view["stage"]) >= at, f"{step} {stage}")
        time.sleep(share * STAGE_SECONDS)
        pid = first.process.pid
        live = start_time(pid) is not None
        os.kill(pid, SIGNALS[fault])
        struck = time.monotonic()
        line["strikes"] = [
            {
                "fault": fault, "group": "controller", "rank": 0, "step": step, "stage": stage, "share": round(share, 3),
                "pid": pid, "live": live, "step_before": view["step"], "stage_before": view["stage"],
            }
        ]  # fmt: skip
        if fault == "kill":
            first.process.wait(timeout=30)
        second = Live(place, place / f"{place.name}.yaml", *(["--takeover"] if fault == "hang" else []))
        code = second.finish()
        line["seconds_after_strike"] = round(time.monotonic() - struck, 2)
        if fault == "hang" and first.process.poll() is None:  # the zombie wakes up: it has to see that it was replaced
            os.kill(pid, signal.SIGCONT)
            line["zombie_exit_code"] = first.process.wait(timeout=60)
            if line["zombie_exit_code"] != REPLACED:
                line |= {"result": "failed", "evidence": first.said()[-2000:]}
        found = end_of(place, steps)
        different = [name for name in wanted if found.get(name) != wanted[name]]
        if code or different:
            line |= {
                "result": "failed" if code else "different",
                "different": different,
                "evidence": second.said()[-2000:],
            }
        line["recorded_twice"] = len(found["keys"]) - len(set(found["keys"]))
        line["processes_left"] = len(await_nothing_left(place))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the trial found
        line |= {"result": "failed", "evidence": f"{type(error).__name__}: {error}"[-3000:]}
        line |= {name: line.get(name, 0) for name in ("recorded_twice", "processes_left")} | {
            "strikes": line.get("strikes", [])
        }
    finally:
        for life in (first, second):
            if life is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(life.process.pid, signal.SIGCONT)
                life.kill()
    return line | {"seconds": round(time.monotonic() - began, 2)}


def started(folder: Path, name: str, steps: int) -> Live:
    config = tiny.write_config(
        folder / name, name, run={"steps": steps}, evaluation={"every": steps},
        storage={"run_directory": {"every": 2, "keep": 2}}, metrics={"tensorboard": False},
    )  # fmt: skip
    return Live(folder / name, config)


def end_of(place: Path, steps: int) -> dict[str, Any]:
    return {
        "records": bits.payload_hashes(place),
        "log_hashes": bits.log_hashes(place),
        "keys": sorted(bits.trajectory_keys(place)),
        **{f"{group} state": bits.state_hashes(place, group, steps) for group in ("policy", "critic")},
    }


def await_nothing_left(place: Path) -> list[str]:
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := left_running(place)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
