"""What surrounds the loop of one attempt: what it shows, how it ends, who stops it, who replaces it."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich
from ray import exceptions as ray_errors

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, UserError
from linckia.api.names import API_VERSION
from linckia.decide.budget import Kind
from linckia.decide.limits import watch_policy
from linckia.decide.rules import Decision
from linckia.observe.observation import RayState
from linckia_trainer import scaling
from linckia_trainer.control.gather import hear, state_api
from linckia_trainer.control.server import OrderRefusedError
from linckia_trainer.control.watcher import Watcher
from linckia_trainer.groups.failure import DEATH, EXCEPTION, GroupLostError
from linckia_trainer.log import attempts
from linckia_trainer.log.patience import NOTE_SECONDS, Patience
from linckia_trainer.log.store import Store
from linckia_trainer.metrics.curves import draw_curves
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.sinks import read_rows
from linckia_trainer.metrics.summary import read_summary, render_summary, summarize, write_summary
from linckia_trainer.run import Run
from linckia_trainer.saving import copy_local_files
from linckia_trainer.start import state_api_address

ANSWER_SECONDS = 2.0  # within which a member that is well answers its control call
EXIT_REPLACED = 4
STOPS = (signal.SIGINT, signal.SIGTERM)


class AttemptView:
    """What the control API shows and takes before and while the run stands."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run: Run | None = None
        self.attempt: int | None = None  # once it is claimed
        self.start_seconds = 0.0
        self.stopped_early = False

    def view(self) -> dict[str, Any]:
        if self.run is None:
            return {
                "api_version": API_VERSION,
                "run": self.config.run.name,
                "uri": self.config.run.dir,
                "attempt": self.attempt,
                "step": 0,
                "steps": self.config.run.steps,
                "stage": "start",
                "groups": {},
            }
        return self.run.view()

    def actions(self) -> dict[str, Any]:
        return {"stop": self.stop, "checkpoint": self.checkpoint, "restart": self.restart, "scale": self.scale}

    def restart(self, name: str, generation: int, reason: str) -> dict[str, Any]:
        """Have a group replaced; said twice of one generation it is done once."""
        run = self._standing()
        groups = {group.name: group for group in run.groups}
        if name not in groups:
            raise OrderRefusedError(404, f"the run has no group {name}; it has {', '.join(groups)}")
        now = groups[name].generation
        if generation != now:
            raise OrderRefusedError(409, f"{name} stands as generation {now}, not {generation}")
        run.healer.report(GroupLostError(name, generation, "hang", "ordered", reason))
        return {"accepted": True, "group": name, "generation": generation}

    def scale(self, engines: int) -> dict[str, Any]:
        """Have that many engines from now on."""
        scaling.request(self._standing(), engines)
        return {"accepted": True, "engines": engines}

    def _standing(self) -> Run:
        if self.run is None:
            raise OrderRefusedError(409, "the run is starting; its groups do not stand yet")
        return self.run

    def stop(self) -> dict[str, Any]:
        if self.run is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.run.stop_requested.set()
        return {"accepted": True}

    def checkpoint(self) -> dict[str, Any]:
        if self.run is not None:
            self.run.checkpoint_requested.set()
        return {"accepted": self.run is not None}


@contextlib.contextmanager
def ending(
    store: Store, attempt: int, config: RunConfig, folder: Path, control: AttemptView, progress: RunProgress
) -> Iterator[None]:
    """Write down how the attempt ended, with summary and curves; a failure is said with the next command to type.

    An interrupt before the loop has begun is a stop, and goes no further.
    """
    try:
        yield
    except FencedError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and (control.run is None or not control.run.stop_requested.is_set()):
            control.stopped_early = True
            sum_up(config, folder, "stopped", control, attempt)
            attempts.end(store, attempt, "stopped")
            progress.message(f"attempt {attempt} was stopped before its first step; the same command goes on")
            return
        cause, fingerprint, kind = describe_failure(error)
        with contextlib.suppress(OSError, UserError):  # the cause matters more than that it could not be written down
            attempts.end(store.patient(Patience(NOTE_SECONDS)), attempt, "failed", cause, fingerprint, kind)
        sum_up(config, folder, "failed", control, attempt)
        step = control.run.log.head() if control.run else 0
        progress.message(
            f"attempt {attempt} failed: {cause}\nstates are kept: the same command goes on after step {step}"
        )
        raise
    assert control.run is not None
    stopped = control.run.log.head() < config.run.steps
    outcome: attempts.Outcome = "stopped" if stopped else "finished"
    sum_up(config, folder, outcome, control, attempt)
    attempts.end(store, attempt, outcome)
    copy_local_files(folder, control.run)
    summary = read_summary(folder)
    assert summary is not None
    rich.print(render_summary(summary, folder))


def sum_up(config: RunConfig, folder: Path, outcome: str, control: AttemptView, attempt: int) -> None:
    rows = read_rows(folder)
    write_summary(folder, summarize(rows, config.run.name, config.run.dir, outcome, control.start_seconds, attempt))
    if rows:
        draw_curves(rows, config.run.name, folder / "curves.png")


def describe_failure(error: BaseException) -> tuple[str, str, Kind]:
    """(cause in words, fingerprint, kind): the same cause has the same fingerprint when it strikes again."""
    raised = getattr(error, "cause", None)  # by a member, and wrapped in Ray's own words; of a lost group it is words
    cause = raised if isinstance(raised, BaseException) else error
    if isinstance(cause, UserError):
        said = getattr(cause, "fingerprint", None) or f"{type(cause).__name__}:{cause.field}"
        return str(cause), said if isinstance(said, str) else "/".join(said), EXCEPTION
    frames = traceback.extract_tb(cause.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    # What Ray, the system or another process did is over with this attempt; all else would be raised again.
    outside = isinstance(cause, (ray_errors.RayError, GroupLostError, OSError, MemoryError, KeyboardInterrupt))
    kind = DEATH if outside and not isinstance(cause, ray_errors.RayTaskError) else EXCEPTION
    return f"{type(cause).__name__}: {lines[-1]}", f"{type(cause).__name__}:{place}", kind


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Until the loop begins SIGTERM interrupts as Ctrl-C does; Ray's own handler would end the process as failed.

    So does SIGINT where a shell started us in the background and had it ignored.
    """

    def interrupt(number: int, frame: Any) -> None:
        for one in STOPS:  # said once or twice (to a process group, and by a supervisor) is the same
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling_stops(interrupt):
        yield


@contextlib.contextmanager
def stop_on_signal(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop after the current step; the second SIGINT interrupts."""

    def ask(number: int, frame: Any) -> None:
        if run.stop_requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_requested.set()
        run.progress.message("stopping after this step; the same command goes on with the run")

    with handling_stops(ask):
        yield


@contextlib.contextmanager
def handling_stops(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to ``handler``; on the main thread alone, since no other can set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOPS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def watching_for_newer(store: Store, attempt: int) -> Iterator[None]:
    """Exit at once, touching nothing, when a newer attempt is claimed. Meanwhile give signs of life."""
    done = threading.Event()

    def watch() -> None:
        while True:
            try:
                superseded = attempts.superseded(store, attempt)
                if not superseded:
                    attempts.give_sign(store, attempt)
            except Exception:  # noqa: BLE001 - whatever the storage says, this watch goes on
                superseded = False  # a storage that does not answer says nothing about other attempts
            if superseded:
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                    print(f"attempt {attempt} was replaced by a newer one and exits", flush=True)
                os._exit(EXIT_REPLACED)
            if done.wait(attempts.SIGN_SECONDS):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def watching(run: Run) -> Iterator[None]:
    """Look at the members while the loop works: their heartbeat, what is shown of them, and who is dead, hung or slow."""
    recovery = run.config.recovery
    alone = recovery.watcher != "embedded"  # then somebody else decides, and the members only hear of their controller

    def act(decision: Decision) -> None:
        if decision.action == "restart":
            run.healer.report(
                GroupLostError(
                    decision.group, decision.generation, decision.kind, decision.signal, decision.reason, decision.stage
                )
            )

    watcher = Watcher(
        run.config.run.name,
        watch_policy(run.config),
        lambda: hear(run, ANSWER_SECONDS),
        (lambda: RayState()) if alone else state_api(run.config.run.name, state_api_address()),
        lambda: (run.step, run.stage_name),
        (lambda decision: None) if alone else act,
        run.progress.message,
    )
    with watcher:
        yield
