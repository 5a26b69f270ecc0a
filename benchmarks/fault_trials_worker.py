"""The process of the fault trials that holds warm groups: a controller, again and again, and the thread that strikes it."""

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fault_plan
import psutil
import ray
from fault_plan import Strike, TrialPlan
from fault_trials import SIGNALS, STEPS, USUAL_RECOVERY_SECONDS
from local import bits, tiny

from linckia.api.config import RunConfig
from linckia.api.load import load_config
from linckia_trainer import entry, start
from linckia_trainer.attempt import AttemptView
from linckia_trainer.checks import Checked, check, check_origin
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.fence import still_runs
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.replace import STATEFUL, Parts, note_processes
from linckia_trainer.groups.replace import replace as next_generation
from linckia_trainer.log import recoveries
from linckia_trainer.log.process import start_time
from linckia_trainer.log.store import Store
from linckia_trainer.metrics import names
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.sinks import read_rows
from linckia_trainer.run import Run
from linckia_trainer.start import Standing
from linckia_trainer.state.choose import newest_valid
from linckia_trainer.state.tiers import RUN_DIRECTORY, Tier, list_states
from linckia_trainer.weights.sync import WeightSync

NAME = "trial"
FORMING_SECONDS = 30.0
Witness = dict[str, Any]


class Bench:
    """Warm groups, and the golden run that every trial is compared with."""

    def __init__(self, folder: Path) -> None:
        path = tiny.write_config(
            folder,
            NAME,
            run={"steps": STEPS},
            storage={"run_directory": {"every": 2, "keep": 2}},
            evaluation={"every": STEPS},
            metrics={"tensorboard": False},
            recovery={
                "watch_seconds": 1,
                "hang_floor_seconds": 4,
                "first_time_factor": 3,
            },  # a trial has no time to learn
        )
        self.folder = folder
        config = load_config(str(path))
        self.checked: Checked = check(config, say)
        self.store = Store(str(folder / "beginning"))
        self.origin = check_origin(self.store, self.checked)
        self.checked = replace(self.checked, config=placed_at(self.checked.config, folder / "beginning"))
        planned = start.connect(self.checked.config, None)
        self.standing: Standing = start.start_groups(self.checked.config, planned, self.store, 1, self.origin, say)
        for group in self.stateful:
            group.call("save", [RUN_DIRECTORY], [], True)
        self.ranks = {name: len(group.members) for name, group in self.standing.groups.items()}
        self.beginning = Store(str(folder / "beginning"))
        self.claimed: dict[
            str, bytes
        ] = {}  # generations: members are named by them in the whole cluster, so none comes twice

    def remember(self) -> None:
        """Keep what was claimed; a trial's folder is deleted when it ended well."""
        store = self.standing.site.store
        self.claimed |= {key: store.get(key) for key in store.list("generations") if not key.endswith(".pids")}

    @property
    def stateful(self) -> list[ActorGroup]:
        return [self.standing.groups[name] for name in STATEFUL]

    @property
    def engines(self) -> list[ActorGroup]:
        return [group for name, group in self.standing.groups.items() if name.startswith("rollout-")]

    def reset(self, place: Path) -> Checked:
        """Everything as a new run in ``place`` finds it: trained groups and engines at state 0, nothing recorded."""
        config = placed_at(self.checked.config, place / "runs" / place.name)
        store = Store(config.run.dir)
        self.remember()
        for key, content in self.claimed.items():
            store.put(key, content)
        for key in self.beginning.list("state"):
            store.put(key, self.beginning.get(key))
        self.standing.site.config, self.standing.site.store = config, store
        for group in self.standing.groups.values():
            note_processes(store, group)
        for group in self.stateful:
            group.call("begin", config, self.origin)
            refs = list_states([Tier(RUN_DIRECTORY, store)], group.name, NAME)
            choice = newest_valid(refs, len(group.members), 0, lambda step: self.origin)
            group.call("restore", choice)
        losses = WeightSync(config, True).sync(0, self.standing.groups["policy"], self.engines)
        assert not losses, losses
        return replace(self.checked, config=config)

    def train(self, place: Path, strikes: "Striker | None" = None) -> Run:
        """One run from its first step to its last on the warm groups."""
        checked = self.reset(place)
        control = AttemptView(checked.config)
        progress = RunProgress(NAME, STEPS, quiet=True)
        store = Store(checked.config.run.dir)
        with strikes.watching(control) if strikes is not None else contextlib.nullcontext():
            ready = entry.Ready(checked, self.origin, store, place / "local", 0, progress)
            entry.run_attempt(ready, 1, self.standing, control, time.monotonic())
        assert control.run is not None
        return control.run

    def make_whole(self) -> None:
        """Replace what was lost too late for the run to miss it, or was still on its way back when the run ended."""
        for group in self.standing.groups.values():
            while True:
                try:
                    group.status()
                    break
                except GroupLostError:
                    with contextlib.suppress(GroupLostError):
                        group.become(next_generation(self.standing.site, group, Parts(), lambda successor: None))

    def processes_left(self) -> list[int]:
        """Pids of lost generations that still run: those written down, and members beyond the ones that stand."""
        store = self.standing.site.store
        current = {f"generations/{name}/{group.generation}.pids" for name, group in self.standing.groups.items()}
        listed = [key for key in store.list("generations") if key.endswith(".pids") and key not in current]
        left = {one["pid"] for key in listed for one in json.loads(store.get(key)) if still_runs(one)}
        standing = {one["pid"] for group in self.standing.groups.values() for one in group.processes}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                if words.startswith("ray::") and "Member" in words and process.pid not in standing:
                    left.add(process.pid)
        return sorted(left)


class Striker:
    """Carries a plan out from a thread, by signals to processes, and keeps what it saw."""

    def __init__(self, plan: TrialPlan, seconds: dict[str, float]) -> None:
        self.plan = plan
        self.seconds = seconds  # a stage usually takes
        self.ended = threading.Event()
        self.seen: list[Witness] = []

    @contextlib.contextmanager
    def watching(self, control: AttemptView) -> Iterator[None]:
        thread = threading.Thread(target=self._work, args=(control,), name="striker")
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()

    def _work(self, control: AttemptView) -> None:
        while (run := control.run) is None:
            if self.ended.wait(0.001):
                return
        for strike in self.plan.strikes:
            self.seen.append(self._strike(run, strike))

    def _strike(self, run: Run, strike: Strike) -> Witness:
        if strike.healing:
            self._await(lambda: bool(run.healer.jobs), FORMING_SECONDS)
            self.ended.wait(strike.share * USUAL_RECOVERY_SECONDS)
            self._await(lambda: bool(processes_of(run, strike.group)), FORMING_SECONDS)
        else:
            wanted = fault_plan.moment(strike.step, strike.stage)
            self._await(lambda: fault_plan.moment(run.step, run.stage_name) >= wanted, 1e9)
            self.ended.wait(strike.share * self.seconds.get(strike.stage, 0.5))
        processes = processes_of(run, strike.group)
        healing = sorted(run.healer.jobs)
        before = (run.step, run.stage_name)
        pid, live = 0, False
        if processes:
            process = processes[strike.rank % len(processes)]
            pid = process["pid"]
            live = not self.ended.is_set() and start_time(pid) == process["start_time"]
            if live:
                try:
                    os.kill(pid, SIGNALS[strike.fault])
                except ProcessLookupError:
                    live = False
        return {
            **asdict(strike),
            "share": round(strike.share, 3),
            "pid": pid,
            "live": live,
            "step_before": before[0],
            "stage_before": before[1],
            "step_after": run.step,
            "stage_after": run.stage_name,
            "returning": healing,
        }

    def _await(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ended.is_set() and time.monotonic() < deadline and not condition():
            time.sleep(0.001)


def processes_of(run: Run, name: str) -> list[dict[str, Any]]:
    """Processes of a group as it stands, or of its next generation if that is coming up. [] if none is known yet."""
    group = run.group(name)
    newest = run.healer.newest(group)
    return [] if newest is group and name in run.healer.jobs else newest.processes


def placed_at(config: RunConfig, place: Path) -> RunConfig:
    storage = config.storage.model_copy(update={"node_memory_dir": str(place.parent / "node_memory")})
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(place)}), "storage": storage})


def end_of(place: Path) -> dict[str, Any]:
    """Everything of a finished run that has to be equal."""
    rows = read_rows(place / "local")
    return {
        "records": bits.payload_hashes(place),
        "log_hashes": bits.log_hashes(place),
        "keys": sorted(bits.trajectory_keys(place)),
        **{f"{group} state": bits.state_hashes(place, group, STEPS) for group in STATEFUL},
        "held-out scores": [row.get(names.EVALUATION_SCORE) for row in rows],
    }


def trial(bench: Bench, golden: dict[str, Any], seconds: dict[str, float], plan: TrialPlan) -> dict[str, Any]:
    began = time.monotonic()
    place = bench.folder / f"seed{plan.seed}"
    striker = Striker(plan, seconds)
    line: dict[str, Any] = {"seed": plan.seed, "kind": plan.kind, "result": "equal"}
    again = 0
    try:
        run = bench.train(place, striker)
        again = run.healer.costs.generated_again
        found = end_of(place)
        different = [name for name in golden if found[name] != golden[name]]
        if different:
            line |= {"result": "different", "different": different}
        line["recorded_twice"] = len(found["keys"]) - len(set(found["keys"]))
    except Exception:  # noqa: BLE001 - whatever it is, it is what the trial found
        line |= {"result": "failed", "evidence": traceback.format_exc()[-3000:], "recorded_twice": 0}
    store = bench.standing.site.store
    line |= {
        "seconds": round(time.monotonic() - began, 2),
        "strikes": striker.seen,
        "recoveries": [
            {
                "group": one.group,
                "kind": one.kind,
                "step": one.step,
                "stage": one.stage,
                "total": round(one.seconds_total, 2),
                "seconds": {part: round(spent, 3) for part, spent in one.seconds.items()},
            }
            for one in recoveries.recoveries(store)
        ],
        "generated_again": again,
    }
    if line["result"] == "equal":
        bench.make_whole()
        bench.remember()
        left = bench.processes_left()
        line["processes_left"] = len(left)
        shutil.rmtree(place)
    else:
        line["processes_left"] = 0
        shutil.copytree(place, Path("/tmp", f"linckia-trial-{plan.seed}"), dirs_exist_ok=True)
    line["seconds_with_mending"] = round(time.monotonic() - began, 2)
    return line


def work(folder: Path, seeds: list[int], faults: list[str]) -> None:
    """Golden run, the same once more, then a line for every trial."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the lines alone
    bench = Bench(folder)
    bench.train(folder / "golden")
    golden = end_of(folder / "golden")
    assert len(golden["records"]) == STEPS
    bench.train(folder / "again")
    assert end_of(folder / "again") == golden, "two runs that nobody struck differ"
    rows = [row for row in read_rows(folder / "golden" / "local") if row["step"]]
    seconds = {stage: sum(row[names.seconds(stage)] for row in rows) / len(rows) for stage in names.STAGES}
    emit(stdout, {"ready": seconds})
    for one in seeds:
        line = trial(bench, golden, seconds, fault_plan.draw(one, bench.ranks, STEPS, faults))
        emit(stdout, line)
        if line["result"] != "equal":
            break
    bench.standing.remove()
    ray.shutdown()


def emit(stdout: Any, line: dict[str, Any]) -> None:
    stdout.write(json.dumps(line) + "\n")
    stdout.flush()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
