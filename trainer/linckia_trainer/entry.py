"""``linckia train`` behind the command line: check everything, claim the attempt, start the groups, train, sum up."""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ray
import rich

from linckia.api.config import RunConfig
from linckia.api.errors import LiveRunError, UserError
from linckia_trainer import controller, recovery, start
from linckia_trainer.attempt import (
    AttemptView,
    ending,
    interrupted_by_signals,
    stop_on_signal,
    watching,
    watching_for_newer,
)
from linckia_trainer.checks import Checked, check, check_origin, check_unchanged
from linckia_trainer.control.server import ControlServer, serve
from linckia_trainer.control.token import run_token
from linckia_trainer.forking import fork_from, open_store, plan_fork
from linckia_trainer.groups import keeper, leftovers
from linckia_trainer.healing import Healer
from linckia_trainer.local import fetch_local, prepare_folder, write_run_file
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.patience import RUN_SECONDS, Patience
from linckia_trainer.log.process import this_host, this_start_time
from linckia_trainer.log.store import Store
from linckia_trainer.made_model import keep_model
from linckia_trainer.metrics import names
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.sinks import Metrics, check_sinks, read_rows
from linckia_trainer.metrics.summary import read_summary, render_summary, summarize
from linckia_trainer.run import Run, fresh_start
from linckia_trainer.saving import save_what_stands
from linckia_trainer.start import Standing
from linckia_trainer.state.aside import refuse_half_moved, set_aside
from linckia_trainer.state.fork import read_fork
from linckia_trainer.state.tiers import node_memory_folder
from linckia_trainer.weights.sync import WeightSync


@dataclass(frozen=True)
class Ready:
    """What an attempt starts from, checked. ``seen_dead``: the newest attempt so far, not alive or to be taken over."""

    checked: Checked
    origin: str
    store: Store
    folder: Path
    seen_dead: int
    progress: RunProgress


def train(
    config: RunConfig,
    config_path: str,
    address: str | None = None,
    takeover: bool = False,
    fork: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
    sources: Sequence[RunConfig] = (),
) -> int:
    """Train a run, or go on with it; returns the exit code (0: finished or stopped by the user).

    ``fork``: the name of a new run made from one of ``sources``, by default the run of ``config``. Raises UserError for
    whatever a user can put right; nothing has been started or lost then.
    """
    began = time.monotonic()
    try:
        ready = prepare(config, takeover, fork, fresh, quiet, sources)
    except KeyboardInterrupt:
        print("stopped before anything was started")
        return 0
    if ready is None:
        return 0
    try:
        return attend(ready, config_path, address, takeover, began)
    except UserError as error:
        raise getattr(error, "cause", error) from None  # raised in a member, it comes wrapped in Ray's own words


def prepare(
    config: RunConfig, takeover: bool, fork: str | None, fresh: bool, quiet: bool, sources: Sequence[RunConfig]
) -> Ready | None:
    """Check everything, and make the fork if one is asked for; None if the run is finished, which is shown."""
    check_sinks(config)
    config, folder = prepare_folder(config)
    if fork is not None:
        source, config = plan_fork(sources or [config], config, fork)
        config, folder = prepare_folder(config)
    store = open_store(config)
    store.probe()
    progress = RunProgress(config.run.name, config.run.steps, quiet)
    if fresh:
        start_afresh(config, store, folder, progress)
    refuse_half_moved(store)
    fetch_local(store, folder)
    if finished(store, config) and fork is None:
        check_unchanged(store, config)
        show_finished(store, config, folder)
        return None
    seen_dead = refuse_live(store, takeover)
    progress.message(f"run {config.run.name} in {config.run.dir}")
    checked = check(config, progress.message, store)
    if fork is not None:
        step = fork_from(source, checked, store)
        progress.message(f"forked from {source.run.name} at step {step}")
    return Ready(checked, check_origin(store, checked), store, folder, seen_dead, progress)


def attend(ready: Ready, config_path: str, address: str | None, takeover: bool, began: float) -> int:
    """One attempt from its claim to its end. A stop before the loop ends it as stopped, with nothing left behind."""
    config, impatient = ready.checked.config, ready.store
    control = AttemptView(config)

    def say(text: str) -> None:
        (ready.progress.message if control.run is None else control.run.warn)(text)

    store = impatient.patient(Patience(RUN_SECONDS, say))  # a storage that fails for a while ends no run of days
    ready = replace(ready, store=store)
    try:
        planned = start.connect(config, address)
        if address is not None:
            keep_model(config, store)  # for the other nodes, and for a controller on another machine
        with interrupted_by_signals():
            server = serve(
                control.view, control.actions(), config.control.host, config.control.port, run_token(config.run.name)
            )
            try:
                attempt = control.attempt = claim(ready, server, takeover)
                with (
                    watching_for_newer(impatient, attempt),
                    ending(store, attempt, config, ready.folder, control, ready.progress),
                    # Ray that this process started ends with it, and all it holds.
                    keeper.kept(config, attempt) if address is not None else contextlib.nullcontext(),
                ):
                    write_run_file(ready.folder, config, config_path, attempt, server.address)
                    host, _, port = server.address.rpartition(":")
                    beacon = start.light_beacon(config.run.name, attempt, host, int(port))
                    standing = start.start_groups(config, planned, store, attempt, ready.origin, ready.progress.message)
                    try:
                        run_attempt(ready, attempt, standing, control, began)
                    finally:
                        standing.remove()
                    del beacon
                # also what had been asked of Ray when the stop came in between
                if control.stopped_early and not attempts.superseded(store, attempt):
                    leftovers.remove(config.run.name, store)
            finally:
                server.close()
    except KeyboardInterrupt:
        if control.run is not None:
            raise
        ready.progress.message("stopped before the attempt began")
    finally:
        ray.shutdown()
    return 0


def claim(ready: Ready, server: ControlServer, takeover: bool) -> int:
    """Claim the next attempt, with what others need to know of it; returns its number."""
    config = ready.checked.config
    info = {
        "host": this_host(),
        "pid": os.getpid(),
        "start_time": this_start_time(),
        "ray_address": ray.get_runtime_context().gcs_address,
        "api_address": server.address,
        "config": config.model_dump(mode="json", exclude={"storage": {"options"}}),
    }
    return attempts.claim(
        ready.store,
        info,
        takeover=takeover,
        beacon_alive=lambda found: start.beacon_alive(found, config.run.name),
        seen_dead=ready.seen_dead,
    )


def run_attempt(ready: Ready, attempt: int, standing: Standing, control: AttemptView, began: float) -> None:
    """The loop of ``controller.train`` with everything around it in place."""
    checked, store, folder, progress = ready.checked, ready.store, ready.folder, ready.progress
    config, groups = checked.config, standing.groups
    forked = read_fork(store)
    log = RunLog(store, ready.origin)
    scores = held_out_scores(folder)
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
        scored_steps=set(scores),
        held_out_score=scores[max(scores)] if scores else None,
        hybrid=config.placement.colocation == "all" and standing.on_gpus,
        first_step=log.head() + 1,
    )
    run.healer = Healer(run, standing.site, partial(recovery.catch_up, run))
    run.healer.start_standbys()
    if run.held_out_score is not None:
        progress.remember(run.held_out_score)
    control.run = run
    control.start_seconds = time.monotonic() - began
    progress.message(f"attempt {attempt} started in {control.start_seconds:.0f} s; log head is step {log.head()}")
    with progress, stop_on_signal(run), watching(run):
        try:
            controller.train(run)
        except Exception:
            save_what_stands(run)
            raise
        finally:
            run.healer.close()
    run.metrics.close()


def held_out_scores(folder: Path) -> dict[int, float]:
    """Step -> held-out score of all attempts so far."""
    rows = read_rows(folder)
    return {row["step"]: row[names.EVALUATION_SCORE] for row in rows if row.get(names.EVALUATION_SCORE) is not None}


def engine_order(item: tuple[str, object]) -> int:
    return int(item[0].rpartition("-")[2]) if item[0].startswith("rollout-") else -1


def start_afresh(config: RunConfig, store: Store, folder: Path, progress: RunProgress) -> None:
    """Move an earlier run aside. A live one would write on at the old place, so it is refused, --takeover or not."""
    refuse_live(store, False, "stop it with `linckia stop`, then give --fresh again")
    moved = set_aside(store, folder)
    if moved is not None:
        progress.message(f"the earlier run is now {moved}")
    shutil.rmtree(node_memory_folder(config), ignore_errors=True)


def refuse_live(
    store: Store,
    takeover: bool,
    next_step: str = "wait for it, stop it with `linckia stop`, or take over with --takeover",
) -> int:
    """LiveRunError if the newest attempt is alive; else its number, 0 if there is none."""
    newest = attempts.latest(store)
    if newest is not None and not takeover and attempts.is_live(store, newest):
        raise LiveRunError(
            "run.dir", store.uri,
            f"attempt {newest.attempt} of this run is alive: process {newest.pid} on {newest.host}", next_step,
        )  # fmt: skip
    return newest.attempt if newest is not None else 0


def finished(store: Store, config: RunConfig) -> bool:
    """Whether the run has done all its steps and said so."""
    newest = attempts.latest(store)
    ended = attempts.outcome(store, newest.attempt) if newest else None
    return ended is not None and ended.outcome == "finished" and RunLog(store, None).head() >= config.run.steps


def show_finished(store: Store, config: RunConfig, folder: Path) -> None:
    summary = read_summary(folder) or summarize(read_rows(folder), config.run.name, config.run.dir, "finished")
    print(f"run {config.run.name} is finished ({config.run.dir})")
    rich.print(render_summary(summary, folder))
