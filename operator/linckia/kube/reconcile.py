"""One idempotent reconcile of a run: read, look, decide, act, write the status once.

Level-triggered: what came before decides nothing that could not be found out again. ``Memory`` saves requests and repeated
events; an operator that starts anew has an empty one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from linckia.act import manifests
from linckia.act.orders import OrderError, restart_group
from linckia.api.kubernetes import CHILDREN_KEPT, GROUP, KIND, RAY_GROUP, RAY_VERSION, VERSION
from linckia.decide import attempts
from linckia.decide.attempts import Chain, Evidence, Verdict
from linckia.decide.judge import Judge
from linckia.decide.limits import policy_from_json
from linckia.decide.notes import Note, name_note, notes, rival_note
from linckia.decide.rules import Decision
from linckia.decide.run_status import Facts, run_status
from linckia.kube import metrics
from linckia.kube.client import Api
from linckia.kube.look import Look, Looker
from linckia.kube.world import World
from linckia.observe.control_api import Beacon, observation
from linckia.observe.kubernetes import RayJobSeen, TrainingRunSeen

TICK_SECONDS = 2.0  # so soon a run is looked at again when nothing wakes it
QUIET_SECONDS = 60.0  # the same for a run that is over

log = logging.getLogger("linckia.operator")


@dataclass
class Memory:
    """What one run has shown to this operator."""

    judge: Judge | None = None
    judged_attempt: int | None = None
    last: Beacon | None = None  # where the controller last answered
    gone_since: float | None = None
    stop_taken: set[str] = field(default_factory=set)  # ids of Ray jobs that were told to stop
    said: dict[str, set[Note]] = field(default_factory=dict)  # by the uid of what it was said of
    patched: float = -manifests.QUICK_SECONDS


@dataclass
class Reconciler:
    """``now``: seconds since 1970; ``clock``: seconds that never go back."""

    namespace: str
    world: World
    api: Api
    looker: Looker
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    memories: dict[str, Memory] = field(default_factory=dict)

    def reconcile(self, run: str) -> float | None:
        """Seconds until the next one; None when there is nothing left to look after. ApiError when Kubernetes fails."""
        found = attempts.chains(self.world.jobs_of(run))
        if not found:
            self.memories.pop(run, None)
            return None
        memory = self.memories.setdefault(run, Memory())
        chain, rivals = found[0], [other.root for other in found[1:] if attempts.ended(other.latest) is None]
        if (note := name_note(run)) is not None:
            for one in found:
                self._say(memory, [note], one.root)
            return QUIET_SECONDS
        for rival in rivals:
            self._say(memory, [rival_note(chain.root, run)], rival)
        training_run = self._training_run(run, chain.root)
        if training_run is None:
            return TICK_SECONDS
        return self._look_after(run, chain, rivals, training_run, memory)

    def _look_after(
        self, run: str, chain: Chain, rivals: list[RayJobSeen], training_run: TrainingRunSeen, memory: Memory
    ) -> float:
        job, pods = chain.latest, self.world.pods_of(chain.latest.cluster)
        over = attempts.ended(job)
        before = manifests.read_status(training_run.status)
        look = Look() if over else self.looker.look(run, job.cluster, pods, memory.last)
        if look.control.view:
            memory.last = look.beacon or memory.last
            self._judge(run, look, memory, training_run)
        step = look.control.view.get("step") if look.control.view else before.step
        verdict = over or self._next_attempt(chain, look, step or 0, memory)
        if verdict.action == "create":
            verdict = self._make_child(chain, training_run, verdict, step or 0)
        said = [] if over else notes(
            job, rivals, self.world.cluster(job.cluster), pods, look.ray, look.control, self.now()
        )  # fmt: skip
        facts = Facts(job, verdict, look.control, look.ray_answers, said, len_made(chain, before.attempts_made), before)
        self._write_status(facts, training_run, memory)
        self._say(memory, [*said, *_about(verdict)], training_run)
        self._delete_superfluous(chain)
        return QUIET_SECONDS if over else TICK_SECONDS

    # ---- the run's groups ----------------------------------------------------------------------------------------

    def _judge(self, run: str, look: Look, memory: Memory, training_run: TrainingRunSeen) -> None:
        """Restart what is dead, hung or slow, where the run leaves that to the operator."""
        view = look.control.view
        try:
            policy = policy_from_json(view.get("watch") or {})
        except ValueError:
            return  # a controller of the version before says nothing of it: its own watcher works
        seen = observation(view, look.ray, self.clock()) if look.ray is not None else None
        if policy.recovery.watcher != "operator" or seen is None:
            return
        judge = memory.judge
        if judge is None:
            judge = memory.judge = Judge(policy, lambda decision: None, log.info, self.clock)
        if memory.judged_attempt != view["attempt"]:  # a new controller has not heard what the last one was told
            memory.judged_attempt = view["attempt"]
            judge.history = replace(judge.history, decided={})
        judge.policy = policy
        judge.act = lambda decision: self._order(run, look, decision, memory, training_run)
        judge.say = lambda text: log.info("%s: %s", run, text)
        judge.look(seen)

    def _order(self, run: str, look: Look, decision: Decision, memory: Memory, training_run: TrainingRunSeen) -> None:
        if decision.action != "restart" or look.control.address is None:
            return
        try:
            result = restart_group(self.looker.http, look.control.address, self.looker.token, decision)
        except OrderError:
            metrics.ORDERS.labels("failed").inc()
            raise
        metrics.ORDERS.labels(result).inc()
        if result == "accepted":
            words = f"restart of {decision.group}, generation {decision.generation}, ordered: {decision.reason}"
            self._event(Note("GroupRestartOrdered", words), training_run)

    # ---- the run's RayJobs ---------------------------------------------------------------------------------------

    def _next_attempt(self, chain: Chain, look: Look, step: int, memory: Memory) -> Verdict:
        """What follows from all that can be seen; only what the verdict can hang on is asked for."""
        job = chain.latest
        evidence = Evidence(
            chain.root, job, chain.children, look.beacon_life, "unknown", look.control_life, step=step,
            stop_taken=job.job_id in memory.stop_taken,
        )  # fmt: skip
        dashboard = self.looker.dashboard(self.world.pods_of(job.cluster), job.cluster)
        if evidence.beacon != "gone" or evidence.control != "gone" or dashboard is None:
            memory.gone_since = None
            return attempts.next_attempt(evidence, self.now())
        supervisor = "gone" if job.job_id is None else self.looker.supervisor(dashboard, job.job_id)
        memory.gone_since = (memory.gone_since or self.now()) if supervisor == "gone" else None
        evidence = replace(evidence, supervisor=supervisor, gone_since=memory.gone_since)
        if evidence.stop_taken and job.job_id is not None and supervisor == "gone":
            evidence = replace(evidence, ray_job=self.looker.job_life(dashboard, job.job_id))
        verdict = attempts.next_attempt(evidence, self.now())
        if verdict.action == "stop" and job.job_id is not None and self.looker.stop_job(dashboard, job.job_id):
            log.info("%s: %s", job.run, verdict.words)
            memory.stop_taken.add(job.job_id)
        return verdict

    def _make_child(self, chain: Chain, training_run: TrainingRunSeen, verdict: Verdict, step: int) -> Verdict:
        root = self.api.get_ray_job(chain.root.name)
        if root is None or root["metadata"]["uid"] != chain.root.uid:
            self.world.forget_job(chain.root.name)
            return Verdict("none", "Deleting", f"RayJob {chain.root.name} is gone")
        child = manifests.child_ray_job(root, training_run, verdict.number, step)
        created = self.api.create_ray_job(child)
        metrics.CHILDREN.labels("created" if created else "existed").inc()
        name = child["metadata"]["name"]
        log.info("%s: %s; %s %s", chain.root.run, verdict.words, name, "goes on" if created else "is there already")
        return replace(verdict, words=f"{verdict.words}; RayJob {name} goes on with the run")

    def _delete_superfluous(self, chain: Chain) -> None:
        for child in attempts.superfluous(chain.children, CHILDREN_KEPT):
            if not child.deleting:
                self.api.delete_ray_job(child.name, child.uid)

    # ---- the run's record ----------------------------------------------------------------------------------------

    def _training_run(self, run: str, root: RayJobSeen) -> TrainingRunSeen | None:
        """The TrainingRun of this very root; made if there is none. None while it is not there yet."""
        found = self.world.training_run(run)
        if found is None:
            standing = self.api.get_ray_job(root.name)  # so that nothing is made for what went while nobody watched
            if standing is None or standing["metadata"]["uid"] != root.uid:
                self.world.forget_job(root.name)
            elif not root.deleting:
                self.api.create_training_run(manifests.training_run(run, self.namespace, root))
            return None
        # That of a root which was deleted goes with it, and is made anew for this one.
        others = found.owners and root.uid not in found.owners
        gone = others and not any(job.uid in found.owners for job in self.world.jobs_of(run))
        return None if gone or found.deleting else found

    def _write_status(self, facts: Facts, training_run: TrainingRunSeen, memory: Memory) -> None:
        wanted = run_status(facts, self.now())
        patch = manifests.status_patch(training_run.status, wanted, self.clock() - memory.patched)
        if patch is None:
            return
        if self.api.patch_status(training_run.name, patch):
            memory.patched = self.clock()
        else:
            self.world.forget_training_run(training_run.name)

    def _say(self, memory: Memory, said: list[Note], about: RayJobSeen | TrainingRunSeen) -> None:
        """An event for each note that was not there at the last look."""
        before = memory.said.get(about.uid, set())
        memory.said[about.uid] = set(said) & before
        for note in dict.fromkeys(said):
            if note not in before:
                log.info("%s: %s: %s", about.name, note.reason, note.words)
                self._event(note, about)
            memory.said[about.uid].add(note)

    def _event(self, note: Note, about: RayJobSeen | TrainingRunSeen) -> None:
        is_job = isinstance(about, RayJobSeen)
        version, kind = (f"{RAY_GROUP}/{RAY_VERSION}", "RayJob") if is_job else (f"{GROUP}/{VERSION}", KIND)
        reference = manifests.reference(version, kind, self.namespace, about.name, about.uid)
        self.api.create_event(manifests.event(note, reference, self.now()))


def len_made(chain: Chain, before: int) -> int:
    """How many children were made: the newest one's number, or what was known before some of them were deleted."""
    return max([before, *(attempts.child_number(child) for child in chain.children)])


def _about(verdict: Verdict) -> list[Note]:
    """The event for a verdict that a person should hear of."""
    told = {"Detached", "StoppingRayJob", "NewAttempt"}
    if verdict.reason not in told and verdict.phase != "Failed":
        return []
    return [Note(verdict.reason, verdict.words, warning=verdict.reason != "NewAttempt")]
