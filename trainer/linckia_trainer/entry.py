"""``linckia train`` behind the command line: check everything, claim the attempt, start the groups, train, sum up."""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, LiveRunError, UserError
from linckia_trainer.checks import Checked, check, check_origin, identity
from linckia_trainer.local import fetch_local, prepare_folder, set_aside, write_run_file
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.process import start_time
from linckia_trainer.log.records import Carried
from linckia_trainer.log.store import Store
from linckia_trainer.metrics import names
from linckia_trainer.metrics.curves import draw_curves
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.sinks import Metrics, check_sinks, read_rows
from linckia_trainer.metrics.summary import read_summary, render_summary, summarize, write_summary
from linckia_trainer.state.fork import find_fork_point, read_fork
from linckia_trainer.state.fork import fork as make_fork

WATCH_SECONDS = 3.0
HEARTBEAT_SECONDS = 5.0


def train(
    config: RunConfig,
    config_path: str,
    address: str | None = None,
    takeover: bool = False,
    fork: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> int:
    """Train a run, or go on with it; returns the exit code (0: finished or stopped by the user).

    Raises UserError for whatever a user can put right; nothing has been started or lost then.
    """
    began = time.monotonic()
    check_sinks(config)
    config, folder = prepare_folder(config)
    source = config
    if fork is not None:
        config, folder = prepare_folder(renamed(config, fork))
    if fresh:
        set_aside(config, folder)
    store = Store(config.run.dir, config.storage.options, config.storage.single_writer)
    store.probe()
    fetch_local(store, folder)
    if finished(store, config) and fork is None:
        return show_finished(store, config, folder)
    refuse_live(store, takeover)
    progress = RunProgress(config.run.name, config.run.steps, quiet)
    progress.message(f"run {config.run.name} in {config.run.dir}")
    checked = check(config, progress.message)
    if fork is not None:
        fork_from(source, checked, store)
    origin = check_origin(store, checked)
    return attend(checked, origin, store, folder, config_path, address, takeover, progress, began)


def attend(
    checked: Checked,
    origin: str,
    store: Store,
    folder: Path,
    config_path: str,
    address: str | None,
    takeover: bool,
    progress: RunProgress,
    began: float,
) -> int:
    """One attempt from its claim to its end."""
    import ray

    from linckia_trainer import start
    from linckia_trainer.control.server import serve
    from linckia_trainer.control.token import run_token

    config = checked.config
    name = config.run.name
    planned = start.connect(config, address)
    control = AttemptView(config)
    server = serve(control.view, control.actions(), config.control.host, config.control.port, run_token(name))
    try:
        info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "ray_address": ray.get_runtime_context().gcs_address,
            "api_address": server.address,
            "config": config.model_dump(mode="json", exclude={"storage": {"options"}}),
        }
        attempt = attempts.claim(
            store, info, takeover=takeover, beacon_alive=lambda found: start.beacon_alive(found, name)
        )
        write_run_file(folder, config, config_path, attempt, server.address)
        host, _, port = server.address.rpartition(":")
        beacon = start.light_beacon(name, attempt, host, int(port))
        with watching_for_newer(store, attempt), ending(store, attempt, config, folder, control, progress):
            standing = start.start_groups(config, planned, store, attempt, origin, progress.message)
            try:
                run_attempt(checked, origin, store, folder, attempt, standing, control, progress, began)
            finally:
                standing.remove()
        del beacon
    finally:
        server.close()
        ray.shutdown()
    return 0


def run_attempt(
    checked: Checked,
    origin: str,
    store: Store,
    folder: Path,
    attempt: int,
    standing: Any,
    control: "AttemptView",
    progress: RunProgress,
    began: float,
) -> None:
    """The loop of ``controller.train`` with everything around it in place."""
    from linckia_trainer import controller
    from linckia_trainer.run import Run, fresh_start
    from linckia_trainer.weights.sync import WeightSync

    config, groups = checked.config, standing.groups
    forked = read_fork(store)
    log = RunLog(store, origin)
    run = Run(
        config=config,
        folder=folder,
        store=store,
        log=log,
        attempt=attempt,
        start=(forked.carried if forked and forked.carried else fresh_start(config)),
        tokenizer=checked.tokenizer,
        pad_token=checked.pad_token,
        prompts=checked.prompts,
        held_out=checked.held_out,
        policy=groups["policy"],
        critic=groups.get("critic"),
        reference=groups.get("reference"),
        reward=groups["reward"],
        engines=[group for key, group in sorted(groups.items(), key=engine_order) if key.startswith("rollout-")],
        weights=WeightSync(config, forked is not None),
        metrics=Metrics(folder, config, attempt),
        progress=progress,
        scored_steps={row["step"] for row in read_rows(folder) if row.get(names.EVALUATION_SCORE) is not None},
        first_step=log.head() + 1,
    )
    control.run = run
    control.start_seconds = time.monotonic() - began
    progress.message(f"attempt {attempt} started in {control.start_seconds:.0f} s; log head is step {log.head()}")
    beat = threading.Thread(target=heartbeat, args=(run,), daemon=True)
    beat.start()
    with progress, stop_on_signal(run):
        controller.train(run)
    run.metrics.close()


def engine_order(item: tuple[str, Any]) -> int:
    return int(item[0].rpartition("-")[2]) if item[0].startswith("rollout-") else -1


class AttemptView:
    """What the control API shows and takes before and while the run stands."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run: Any = None
        self.start_seconds = 0.0

    def view(self) -> dict[str, Any]:
        if self.run is None:
            return {
                "api_version": names_version(),
                "run": self.config.run.name,
                "step": 0,
                "stage": "start",
                "groups": {},
            }
        shown: dict[str, Any] = self.run.view()
        return shown

    def actions(self) -> dict[str, Any]:
        return {"stop": self.stop, "checkpoint": self.checkpoint}

    def stop(self) -> dict[str, Any]:
        if self.run is None:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.run.stop_requested.set()
        return {"accepted": True}

    def checkpoint(self) -> dict[str, Any]:
        if self.run is not None:
            self.run.checkpoint_requested.set()
        return {"accepted": self.run is not None}


def names_version() -> int:
    from linckia.api.names import API_VERSION

    return API_VERSION


@contextlib.contextmanager
def ending(
    store: Store, attempt: int, config: RunConfig, folder: Path, control: AttemptView, progress: RunProgress
) -> Iterator[None]:
    """Write down how the attempt ended, with summary and curves; a failure is said with the next command to type."""
    try:
        yield
    except FencedError:
        raise
    except BaseException as error:
        cause, fingerprint = describe_failure(error)
        with contextlib.suppress(OSError, UserError):  # the cause matters more than that it could not be written down
            attempts.end(store, attempt, "failed", cause, fingerprint)
        sum_up(config, folder, "failed", control)
        raise
    stopped = control.run.log.head() < config.run.steps
    outcome: attempts.Outcome = "stopped" if stopped else "finished"
    sum_up(config, folder, outcome, control)
    attempts.end(store, attempt, outcome)
    from linckia_trainer.saving import copy_local_files

    copy_local_files(folder, control.run)
    summary = read_summary(folder)
    assert summary is not None
    rich.print(render_summary(summary, folder))


def sum_up(config: RunConfig, folder: Path, outcome: str, control: AttemptView) -> None:
    rows = read_rows(folder)
    write_summary(folder, summarize(rows, config.run.name, config.run.dir, outcome, control.start_seconds))
    if rows:
        draw_curves(rows, config.run.name, folder / "curves.png")


def describe_failure(error: BaseException) -> tuple[str, str]:
    """(cause in words, fingerprint): the same cause has the same fingerprint when it strikes again."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, UserError):
        return str(cause), getattr(cause, "fingerprint", None) or f"{type(cause).__name__}:{cause.field}"
    frames = traceback.extract_tb(cause.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"{type(cause).__name__}: {lines[-1]}", f"{type(cause).__name__}:{place}"


@contextlib.contextmanager
def stop_on_signal(run: Any) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop after the current step; the second SIGINT interrupts."""

    def ask(number: int, frame: Any) -> None:
        if run.stop_requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_requested.set()
        run.progress.message("stopping after this step; the same command goes on with the run")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def watching_for_newer(store: Store, attempt: int) -> Iterator[None]:
    """Exit at once, touching nothing, when a newer attempt is claimed."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            try:
                superseded = attempts.superseded(store, attempt)
            except (OSError, UserError):
                continue  # a storage that does not answer says nothing about other attempts
            if superseded:
                print(f"attempt {attempt} was replaced by a newer one and exits", flush=True)
                os._exit(4)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def heartbeat(run: Any) -> None:
    """Tell the members that their controller lives, and keep what they say for the control API."""
    import ray

    while True:
        for group in run.groups:
            try:
                run.members[group.name] = group.status()
            except (ray.exceptions.RayError, FencedError):
                continue  # whoever calls the group for work learns of its death and acts
            for member in run.members[group.name]:
                if member.get("saving_problem"):
                    run.warn(member["saving_problem"])
        time.sleep(HEARTBEAT_SECONDS)


def refuse_live(store: Store, takeover: bool) -> None:
    newest = attempts.latest(store)
    if newest is not None and not takeover and attempts.is_live(store, newest):
        raise LiveRunError(
            "run.dir", store.uri,
            f"attempt {newest.attempt} of this run is alive: process {newest.pid} on {newest.host}",
            "wait for it, stop it with `linckia stop`, or take over with --takeover",
        )  # fmt: skip


def finished(store: Store, config: RunConfig) -> bool:
    """Whether the run has done all its steps and said so."""
    newest = attempts.latest(store)
    ended = attempts.outcome(store, newest.attempt) if newest else None
    return ended is not None and ended.outcome == "finished" and RunLog(store, None).head() >= config.run.steps


def show_finished(store: Store, config: RunConfig, folder: Path) -> int:
    summary = read_summary(folder) or summarize(read_rows(folder), config.run.name, config.run.dir, "finished")
    rich.print(f"run {config.run.name} is finished ({config.run.dir})")
    rich.print(render_summary(summary, folder))
    return 0


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The config of a fork: another name, and a run directory beside the source's."""
    place = str(config.run.dir).rstrip("/")
    return config.model_copy(
        update={"run": config.run.model_copy(update={"name": name, "dir": f"{place.rpartition('/')[0]}/{name}"})}
    )


def fork_from(source: RunConfig, checked: Checked, target: Store) -> None:
    """Make ``target`` a run whose state 0 is the newest checkpoint of ``source``."""
    store = Store(source.run.dir, source.storage.options, source.storage.single_writer)
    log = RunLog(store, None)
    worlds = {"policy": source.policy.world_size}
    if source.has_critic:
        worlds["critic"] = source.critic.world_size
    point = find_fork_point(store, source.run.name, log, worlds)
    forked_origin = identity(checked, {"run": source.run.name, "step": point.step, "log_hash": point.log_hash})
    make_fork(target, checked.config.run.name, forked_origin, point, store)


__all__ = ["Carried", "asdict", "shutil", "train"]
