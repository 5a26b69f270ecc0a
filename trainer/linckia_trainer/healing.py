"""Healing: a lost group is replaced beside the running work, brought to the head of the log, and the stage goes on.

Whoever sees a loss reports it: a call that failed, or the watcher. The replacement runs in a thread up to loaded models;
what touches the log (restore, replay, refit) is done by the main thread when it next needs the group. A report fences
first, and the fence ends whatever call still waits for a member that hangs: so nobody needs to wait with a time limit.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from linckia.api.errors import FencedError, UserError
from linckia.api.names import role_of
from linckia.decide.budget import Failure, RecoveryRecord, Stop, next_restart
from linckia_trainer.experience.batching import unshard
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.fence import fence
from linckia_trainer.groups.group import ActorGroup, Call, Sharded
from linckia_trainer.groups.replace import Parts, Site, refuse_if_replaced, replace, start_standbys
from linckia_trainer.log import recoveries
from linckia_trainer.log.patience import NOTE_SECONDS, Patience
from linckia_trainer.log.recoveries import Recovery
from linckia_trainer.metrics.recovery import Costs

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Result = TypeVar("Result")
CatchUp = Callable[[list[ActorGroup], Parts], None]


class UnhealableError(UserError):
    """A loss that no further restart would mend. States and log are kept."""

    fingerprint = ""
    exit_code = 3  # it was tried again already, as often as it may be


@dataclass
class Job:
    """The replacement of one group, from the report of its loss until it is back at work.

    ``loss`` is None for a group that is new to the run.
    """

    loss: GroupLostError | None
    step: int
    stage: str
    reported: float  # seconds since 1970
    began: float = field(default_factory=time.monotonic)
    parts: Parts = field(default_factory=Parts)
    forming: ActorGroup | None = None
    done: "Future[None]" = field(default_factory=Future)
    number: int = 0  # of the loss it began with


class Healer:
    """What is being replaced, and what was. ``catch_up`` brings trained groups to the head of the log."""

    def __init__(self, run: "Run", site: Site, catch_up: CatchUp) -> None:
        self.run = run
        self.site = site
        self.notes = site.store.patient(Patience(NOTE_SECONDS))
        self.catch_up = catch_up
        self.lock = threading.RLock()
        self.jobs: dict[str, Job] = {}
        self.losses: list[RecoveryRecord] = recoveries.losses(site.store)
        self.finished: list[Recovery] = []
        self.unhealable: UnhealableError | None = None
        self.costs = Costs()
        self.closing = threading.Event()
        self.pool = ThreadPoolExecutor(max_workers=2 * len(run.groups) + 4, thread_name_prefix="heal")

    def report(self, loss: GroupLostError) -> None:
        """A generation of a group is lost; may be said by any thread, any number of times. Returns at once."""
        with self.lock:
            groups = {group.name: group for group in self.run.groups}
            if loss.group not in groups:
                return  # an engine that leaves: its prompts go to others, and it was to go anyway
            group = groups[loss.group]
            job = self.jobs.get(group.name)
            if self.closing.is_set() or (job is None and loss.generation != group.generation):
                return
            if loss.whole:
                self._spend(group, self.run.step, self.run.stage_name, loss)
                return
            if job is not None:
                self._successor_lost(group, job, loss)
                return
            job = Job(loss, self.run.step, loss.stage or self.run.stage_name, time.time())
            self.jobs[group.name] = job
            self.run.progress.message(f"{loss}; it is replaced")
            self.pool.submit(self._work, group, job)

    def _successor_lost(self, group: ActorGroup, job: Job, loss: GroupLostError) -> None:
        """What is to take a lost group's place is lost too: in the same recovery it is replaced as well."""
        if job.forming is None or loss.generation != job.forming.generation:
            return  # said of the generation that is being replaced
        if not job.done.done():
            self.pool.submit(fence, job.forming.members, job.forming.processes)  # the job sees it fail
        elif job.done.exception() is None:
            job.loss, job.done = loss, Future()
            self.pool.submit(self._work, group, job)

    def bring_up(self, group: ActorGroup) -> None:
        """Start a group that is new to the run, beside the running work."""
        with self.lock:
            job = Job(None, self.run.step, self.run.stage_name, time.time())
            self.jobs[group.name] = job
            self.pool.submit(self._work, group, job)

    def forget(self, group: ActorGroup) -> None:
        """A group leaves the run."""
        with self.lock:
            self.jobs.pop(group.name, None)

    def newest(self, group: ActorGroup) -> ActorGroup:
        """The group, or what is to become of it where that has members already."""
        with self.lock:
            job = self.jobs.get(group.name)
            return group if job is None or job.forming is None else job.forming

    def returning(self, group: ActorGroup) -> bool:
        """Whether a group is being replaced and not loaded yet."""
        with self.lock:
            job = self.jobs.get(group.name)
            return job is not None and not job.done.done()

    def settle(self, *groups: ActorGroup) -> None:
        """Wait until these groups stand: the trained ones at the head of the log. Main thread only.

        Raises UnhealableError when a loss must not be answered by another restart, UserError when there is no place.
        """
        for group in groups:
            while (job := self.jobs.get(group.name)) is not None:
                with self.costs.standing_still(job.parts):
                    self._adopt(group, job)
                    try:
                        if group in self.run.stateful:
                            self.catch_up([group], job.parts)
                    except GroupLostError as loss:
                        self.report(loss)
                    else:
                        self._finish(group, job)
        if self.unhealable is not None:
            raise self.unhealable

    def loaded(self, engines: list[ActorGroup]) -> list[ActorGroup]:
        """Of these engines those that stand, or are loaded and lack nothing but weights. Raises like ``settle``."""
        for engine in list(engines):
            job = self.jobs.get(engine.name)
            if job is not None and job.done.done():
                self._check(engine, job)
        if self.unhealable is not None:
            raise self.unhealable
        return [engine for engine in engines if not self.returning(engine) and engine.generation]

    def refitted(self, engines: list[ActorGroup], seconds: float) -> None:
        """These engines have their weights: those that were being replaced are back."""
        for engine in engines:
            job = self.jobs.get(engine.name)
            if job is not None and job.done.done():
                job.parts.seconds["refit"] = seconds
                self._finish(engine, job)

    def await_one(self, engines: list[ActorGroup]) -> None:
        """Wait until at least one of these engines is loaded."""
        with self.costs.standing_still():
            while not self.loaded(engines):
                time.sleep(0.05)

    def start_standbys(self) -> None:
        """Have every group's standbys ready; again after one was used."""
        if self.site.config.recovery.standbys:
            for name in [group.name for group in self.run.groups]:
                self.pool.submit(start_standbys, self.site, name)

    def close(self) -> None:
        """No further replacement begins; those on their way are given up."""
        self.closing.set()
        with self.lock:
            forming = [job.forming for job in self.jobs.values() if job.forming is not None]
        for group in [*forming, *(standby for waiting in self.site.standbys.values() for standby in waiting)]:
            group.kill()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _check(self, engine: ActorGroup, job: Job) -> None:
        """Raise what went wrong with a replacement; an engine that was only asked for is given up instead."""
        try:
            self._adopt(engine, job)
        except UserError as error:
            if job.loss is not None:
                raise
            self.run.warn(f"{engine.name} cannot be added: {error}")
            self.run.engines.remove(engine)
            self.run.wanted_engines = len(self.run.engines)
            self.forget(engine)

    def _work(self, group: ActorGroup, job: Job) -> None:
        """Replace until a successor stands loaded, or the budget is spent."""
        try:
            loss = job.loss
            fresh = loss is None
            while (loss is not None or fresh) and not self.closing.is_set():
                fresh = False
                refuse_if_replaced(self.site)  # what looks lost is in a newer attempt's hands
                if loss is not None:
                    with job.parts.part("wait"):
                        number = self._spend(group, job.step, job.stage, loss)
                        job.number = job.number or number
                loss = self._try(group, job)
            job.done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - it is the main thread that has to stop for it
            if isinstance(error, UnhealableError):
                self.unhealable = error
            job.done.set_exception(error)

    def _fence_lost_nodes(self) -> None:
        """All that stood on a lost node is lost with it: fence and report it before anything is placed again."""
        dead = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
        for group in self.run.groups:
            if dead & {process["node_id"] for process in group.processes}:
                fence(group.members, group.processes)
                self.report(GroupLostError(group.name, group.generation, "death", "NODE_DIED", "its node is lost"))

    def _try(self, group: ActorGroup, job: Job) -> GroupLostError | None:
        def forming(successor: ActorGroup) -> None:
            job.forming = successor
            if self.closing.is_set():
                raise FencedError(f"{group.name} is not needed any more: the run ends")

        try:
            self._fence_lost_nodes()
            if job.forming is not None:
                fence(job.forming.members, job.forming.processes)
            replace(self.site, group, job.parts, forming)
        except GroupLostError as again:
            return again
        return None

    def _spend(self, group: ActorGroup, step: int, stage: str, loss: GroupLostError) -> int:
        """Write a loss down, ask the budget for one more try and wait as long as it says; returns the loss's number.

        UnhealableError if the budget says no.
        """
        fingerprint = f"{role_of(group.name)}/{stage}/{loss.place}"
        record = RecoveryRecord(group.name, step, fingerprint, loss.kind, time.time())
        failure = Failure(group.name, step, fingerprint, loss.kind, loss.cause)
        with self.lock:
            verdict = next_restart(self.losses, failure, record.time, self.site.config.recovery)
            self.losses.append(record)
        number = self._noted(partial(recoveries.note_loss, self.notes, record)) or 0
        if isinstance(verdict, Stop):
            fence(group.members, group.processes)  # whoever waits for it has to hear of it
            error = UnhealableError(group.name, loss.cause, verdict.reason, verdict.next_step)
            error.fingerprint = fingerprint
            raise error
        self.closing.wait(verdict.after_seconds)
        return number

    def _adopt(self, group: ActorGroup, job: Job) -> None:
        """Wait until a successor is loaded, and go on with it. By the main thread alone: else a call that it makes to a
        group at the head of the log could reach a successor that has not been brought there."""
        job.done.result()
        assert job.forming is not None
        group.become(job.forming)

    def _finish(self, group: ActorGroup, job: Job) -> None:
        with self.lock:
            del self.jobs[group.name]
        self.start_standbys()
        self.run.progress.message(
            f"{group.name} stands as generation {group.generation} after {time.monotonic() - job.began:.1f} s"
        )
        with contextlib.suppress(GroupLostError):  # whoever next calls the group learns of it
            self.run.members[group.name] = group.status()
        if job.loss is None:
            return
        found = Recovery(
            group=group.name,
            role=role_of(group.name),
            generation_lost=job.loss.generation,
            generation=group.generation,
            kind=job.loss.kind,
            cause=job.loss.cause,
            step=job.step,
            stage=job.stage,
            attempt=self.run.attempt,
            time=job.reported,
            seconds_total=time.monotonic() - job.began,
            seconds=dict(job.parts.seconds),
        )
        self.finished.append(found)
        self._noted(partial(recoveries.note_recovery, self.notes, job.number, found))

    def _noted(self, write: Callable[[], Result]) -> Result | None:
        """Storage that fails for a while must not keep a group from being healed."""
        try:
            return write()
        except (OSError, UserError) as error:
            self.run.warn(f"a loss or recovery could not be written down: {error}")
            return None


def healed(run: "Run", work: Callable[[], Result], *groups: ActorGroup) -> Result:
    """``work()`` on groups that stand; again, once it is healed, whenever a group is lost in it."""
    while True:
        run.healer.settle(*groups)
        try:
            return work()
        except GroupLostError as loss:
            run.healer.report(loss)


def answered(
    run: "Run", group: ActorGroup, call: Call, again: Callable[[], Call], timeout: float | None = None
) -> list[Any]:
    """The results of a call on its way; those of ``again()``, once it is healed, whenever the group is lost before."""
    try:
        return call.results(timeout)
    except GroupLostError as loss:
        run.healer.report(loss)
        return healed(run, lambda: again().results(timeout), group)


class Asked:
    """A ``call_sharded`` that is asked again, of the healed group, if the group is lost before it has answered."""

    def __init__(self, run: "Run", group: ActorGroup, method: str, batch: Any, **keywords: Any) -> None:
        self.run = run
        self.group = group
        self.ask: Callable[[], Sharded] = partial(group.call_sharded, method, batch, **keywords)
        run.healer.settle(group)
        self.call = self.ask()

    @property
    def rows(self) -> list[NDArray[np.int64]]:
        """Which rows of the batch each slice holds: the same however often it is asked."""
        return self.call.rows

    def results(self, timeout: float | None = None) -> list[Any]:
        """As ``Sharded.results``."""
        return answered(self.run, self.group, self.call, self.ask, timeout)

    def rows_joined(self) -> dict[str, Any]:
        """As ``Sharded.rows_joined``."""
        return unshard(self.results(), self.rows)
