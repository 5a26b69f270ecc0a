"""What a person should know of a run's RayJob, RayCluster and pods, with the next step to take. Pure.

A note with ``misconfigured`` is a condition of the TrainingRun as long as it holds; every note is an event when it begins.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from linckia.api.kubernetes import RUN_LABEL
from linckia.observe.control_api import ControlSeen
from linckia.observe.kubernetes import COMMAND_NOT_FOUND, ContainerTrouble, PodSeen, RayClusterSeen, RayJobSeen
from linckia.observe.observation import RayState

UNSCHEDULABLE_SECONDS = 60.0  # an autoscaler may be at work that long before a person needs to look
STUCK_SECONDS = 30.0  # a pod should be gone by its own time limit; so long after it the node is at fault
MESSAGE_LENGTH = 400

# Source: RFC 1123 as Kubernetes checks names of objects (validation.IsDNS1123Subdomain).
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True)
class Note:
    """``reason`` is CamelCase. Two notes with the same reason and words are the same, however often they are seen."""

    reason: str
    words: str
    warning: bool = True
    misconfigured: bool = False


def name_note(run: str) -> Note | None:
    """A run label that cannot be the name of a TrainingRun; nothing can be done for such a run."""
    if len(run) <= 63 and _DNS_NAME.fullmatch(run):
        return None
    return Note(
        "InvalidRunName",
        f"the label {RUN_LABEL}={run} cannot name a TrainingRun: use lower-case letters, digits, '-' and '.' only, for it and "
        f"for run.name, and apply the RayJob anew; until then the operator does nothing for this run",
        misconfigured=True,
    )


def rival_note(winner: RayJobSeen, run: str) -> Note:
    """For a RayJob whose run label another one had before."""
    return Note(
        "RunTaken",
        f"RayJob {winner.name} has the run {run} already; the operator does nothing for this RayJob. "
        f"Delete one of the two, or give this one another {RUN_LABEL} and run.name",
        misconfigured=True,
    )


def notes(
    job: RayJobSeen,
    rivals: Sequence[RayJobSeen],
    cluster: RayClusterSeen | None,
    pods: Sequence[PodSeen],
    ray: RayState | None,
    control: ControlSeen,
    now: float,
) -> list[Note]:
    """Everything to be said of one run, the most important first. ``now``: seconds since 1970."""
    return [
        *_job_notes(job, rivals),
        *_access_notes(ray, control),
        *_pod_notes(pods, now),
        *_worker_notes(cluster, job),
    ]


def _job_notes(job: RayJobSeen, rivals: Iterable[RayJobSeen]) -> Iterator[Note]:
    if job.selects and job.backoff_limit > 0:
        yield Note(
            "BackoffLimitDeletesCluster",
            f"RayJob {job.name} has clusterSelector and backoffLimit {job.backoff_limit}: a retry deletes the RayCluster it "
            f"shares. Apply it with backoffLimit 0; the operator makes the next attempt itself",
            misconfigured=True,
        )
    if job.selects and (job.suspended or job.deployment_status == "ValidationFailed"):
        yield Note(
            "SuspendNotPossible",
            f"RayJob {job.name} with clusterSelector cannot be suspended: KubeRay refuses it and stops nothing. Set suspend to "
            f"false; `linckia stop {job.run}` stops the run after its step",
            misconfigured=True,
        )
    for rival in rivals:
        yield Note(
            "RunTaken",
            f"RayJob {rival.name} claims the run {job.run} too; nothing is done for it. Delete it, or give it another run",
            misconfigured=True,
        )


def _access_notes(ray: RayState | None, control: ControlSeen) -> Iterator[Note]:
    if control.outcome == "refused":
        yield Note(
            "TokenRefused",
            f"{control.problem}: give the RayJob's LINCKIA_TOKEN and the operator's the same Secret, then restart the one that "
            "was started with the old one",
            misconfigured=True,
        )
    if control.outcome == "version":
        yield Note("UnknownApiVersion", control.problem, misconfigured=True)
    if control.outcome == "stranger":
        yield Note("ControllerNotBelieved", control.problem)
    if ray is not None and any("token is refused" in problem for problem in ray.problems):
        yield Note(
            "RayTokenRefused",
            "the Ray dashboard refuses the operator's token: set RAY_AUTH_MODE=disabled on the RayCluster, or give the operator "
            "its token in RAY_AUTH_TOKEN",
            misconfigured=True,
        )


def _pod_notes(pods: Sequence[PodSeen], now: float) -> Iterator[Note]:
    for pod in pods:
        for trouble in pod.troubles:
            yield _trouble_note(pod, trouble)
        if pod.unschedulable and now - pod.unschedulable_since > UNSCHEDULABLE_SECONDS:
            yield Note(
                "Unschedulable",
                f"pod {pod.name} fits on no node: {pod.unschedulable[:MESSAGE_LENGTH]}. Change the pool's resources, selectors "
                f"or tolerations, or add nodes",
                misconfigured=True,
            )
        if pod.delete_by is not None and (pod.evicted or now - pod.delete_by > STUCK_SECONDS):
            yield Note(
                "NodeCutOff",
                f"pod {pod.name} cannot be deleted: its node {pod.node} does not answer, and it counts as a worker until it is "
                f"gone. Once the node is off for certain: kubectl delete pod {pod.name} --grace-period=0 --force",
            )


def _trouble_note(pod: PodSeen, trouble: ContainerTrouble) -> Note:
    where = f"container {trouble.container} of pod {_without_hash(pod.name)}"
    if trouble.exit_code == COMMAND_NOT_FOUND:
        return Note(
            "CommandNotFound",
            f"{where} ends with exit code {COMMAND_NOT_FOUND}, command not found: its image has no `ray`. Use an image with Ray "
            f"(docs/kubernetes.md)",
            misconfigured=True,
        )
    words = trouble.message[:MESSAGE_LENGTH] or "no further words"
    words = re.sub(r"back-off \S+ | pod=\S+", "", words)  # what changes while the trouble is the same
    ended = f", exit code {trouble.exit_code}" if trouble.exit_code is not None else ""
    return Note(trouble.reason, f"{where} does not come up: {trouble.reason}{ended}: {words}", misconfigured=True)


def _without_hash(pod: str) -> str:
    """A pod's name without its random end: a pod that is made again and again is one trouble.

    Example: ``_without_hash("gpu-worker-a100-x7k2p")`` is ``gpu-worker-a100``
    """
    return pod.rpartition("-")[0] or pod


def _worker_notes(cluster: RayClusterSeen | None, job: RayJobSeen) -> Iterator[Note]:
    if cluster is not None and cluster.ready < cluster.desired and not job.terminal:
        yield Note("WaitingForWorkers", f"waiting: {cluster.ready}/{cluster.desired} workers", warning=False)
