"""What the objects of Kubernetes say: RayJobs, RayClusters, pods and TrainingRuns as plain frozen records.

Every record is made from one object as the API server lists it (a dict). What an object lacks is None or empty: anyone may
have written it, so nothing is taken for granted and nothing raises.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from linckia.api.kubernetes import (
    ATTEMPT_OF_LABEL,
    RAY_CLUSTER_LABEL,
    RAY_NODE_TYPE_LABEL,
    RUN_LABEL,
    STEP_ANNOTATION,
)

Object = Mapping[str, Any]

TERMINAL_JOB = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})  # jobStatus: what Ray says of the job
TERMINAL_DEPLOYMENT = frozenset({"Complete", "Failed"})  # jobDeploymentStatus: what KubeRay says of the RayJob

# Source: ray/dashboard/modules/job/job_supervisor.py; the log's tail follows, which may hold anything and is not read.
_EXIT_CODE = re.compile(r"Job entrypoint command failed with exit code (-?\d{1,4})\b")


@dataclass(frozen=True)
class RayJobSeen:
    """One RayJob. ``cluster``: the RayCluster it runs on, once known. ``created``: seconds since 1970.

    ``selects``: it runs on a RayCluster that somebody else made (clusterSelector), which outlives it. ``exit_code`` is that
    of its entrypoint, where Ray has said so. ``at_step``: on a child, the step the run had come to when it was made.

    Example: ``RayJobSeen("first-run", "6a1c", 1.7e9, run="first-run", cluster="gpu", selects=True, job_status="RUNNING")``
    """

    name: str
    uid: str
    created: float
    run: str
    attempt_of: str | None = None
    cluster: str | None = None
    selects: bool = False
    job_id: str | None = None
    job_status: str = ""
    deployment_status: str = ""
    exit_code: int | None = None
    reason: str = ""
    backoff_limit: int = 0
    suspended: bool = False
    deleting: bool = False
    at_step: int = 0

    @property
    def terminal(self) -> bool:
        """It has ended, as far as KubeRay knows; the controller may live all the same."""
        return self.job_status in TERMINAL_JOB or self.deployment_status in TERMINAL_DEPLOYMENT


@dataclass(frozen=True)
class RayClusterSeen:
    """One RayCluster. ``ready`` of ``desired`` workers are ready, as KubeRay counts them.

    Example: ``RayClusterSeen("gpu", ready=7, desired=8)``
    """

    name: str
    ready: int = 0
    desired: int = 0
    deleting: bool = False


@dataclass(frozen=True)
class ContainerTrouble:
    """A container that does not come up. ``reason`` is the kubelet's own word, ``exit_code`` that of its last life.

    Example: ``ContainerTrouble("ray-head", "CrashLoopBackOff", "back-off 5m0s restarting", exit_code=127, restarts=4)``
    """

    container: str
    reason: str
    message: str = ""
    exit_code: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class PodSeen:
    """One pod of a RayCluster. ``delete_by``: when it should be gone (seconds since 1970), None while nobody deletes it.

    ``evicted``: it is deleted because its node does not answer. ``unschedulable``: the scheduler's words, since
    ``unschedulable_since``.

    Example: ``PodSeen("gpu-worker-x", "9f", "gpu", head=False, ip="10.1.0.7", node="node-b", running=True)``
    """

    name: str
    uid: str
    cluster: str
    head: bool
    created: float = 0.0
    ip: str | None = None
    node: str | None = None
    running: bool = False
    ready: bool = False
    delete_by: float | None = None
    evicted: bool = False
    unschedulable: str = ""
    unschedulable_since: float = 0.0
    troubles: tuple[ContainerTrouble, ...] = ()


@dataclass(frozen=True)
class TrainingRunSeen:
    """The TrainingRun as it stands. ``owners``: uids of what it is deleted with."""

    name: str
    uid: str
    owners: tuple[str, ...]
    status: Mapping[str, Any]
    deleting: bool = False


def ray_job_seen(found: Object) -> RayJobSeen:
    """A RayJob of the API's answer."""
    metadata, spec, status = _map(found, "metadata"), _map(found, "spec"), _map(found, "status")
    labels = _map(metadata, "labels")
    selector = _map(spec, "clusterSelector")
    message = _EXIT_CODE.match(str(status.get("message") or ""))
    return RayJobSeen(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        created=seconds(metadata.get("creationTimestamp")) or 0.0,
        run=str(labels.get(RUN_LABEL) or ""),
        attempt_of=labels.get(ATTEMPT_OF_LABEL) or None,
        cluster=status.get("rayClusterName") or selector.get(RAY_CLUSTER_LABEL) or None,
        selects=bool(selector),
        job_id=status.get("jobId") or None,
        job_status=str(status.get("jobStatus") or ""),
        deployment_status=str(status.get("jobDeploymentStatus") or ""),
        exit_code=int(message[1]) if message else None,
        reason=str(status.get("reason") or ""),
        backoff_limit=_int(spec.get("backoffLimit")),
        suspended=bool(spec.get("suspend")),
        deleting=bool(metadata.get("deletionTimestamp")),
        at_step=_int(_map(metadata, "annotations").get(STEP_ANNOTATION)),
    )


def ray_cluster_seen(found: Object) -> RayClusterSeen:
    """A RayCluster of the API's answer."""
    metadata, status = _map(found, "metadata"), _map(found, "status")
    return RayClusterSeen(
        name=str(metadata.get("name", "")),
        ready=_int(status.get("readyWorkerReplicas")),
        desired=_int(status.get("desiredWorkerReplicas")),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def pod_seen(found: Object) -> PodSeen:
    """A pod of the API's answer."""
    metadata, status = _map(found, "metadata"), _map(found, "status")
    labels = _map(metadata, "labels")
    conditions = {str(one.get("type")): one for one in _maps(status, "conditions")}
    scheduled, disruption = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    stuck = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    statuses = [*_maps(status, "initContainerStatuses"), *_maps(status, "containerStatuses")]
    return PodSeen(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        cluster=str(labels.get(RAY_CLUSTER_LABEL) or ""),
        head=labels.get(RAY_NODE_TYPE_LABEL) == "head",
        created=seconds(metadata.get("creationTimestamp")) or 0.0,
        ip=status.get("podIP") or None,
        node=_map(found, "spec").get("nodeName") or None,
        running=status.get("phase") == "Running",
        ready=conditions.get("Ready", {}).get("status") == "True",
        delete_by=seconds(metadata.get("deletionTimestamp")),
        evicted=disruption.get("status") == "True" and disruption.get("reason") == "DeletionByTaintManager",
        unschedulable=str(scheduled.get("message") or "no node fits") if stuck else "",
        unschedulable_since=(seconds(scheduled.get("lastTransitionTime")) or 0.0) if stuck else 0.0,
        troubles=tuple(trouble for one in statuses if (trouble := _trouble(one)) is not None),
    )


def training_run_seen(found: Object) -> TrainingRunSeen:
    """A TrainingRun of the API's answer."""
    metadata = _map(found, "metadata")
    return TrainingRunSeen(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        owners=tuple(str(one.get("uid")) for one in _maps(metadata, "ownerReferences")),
        status=_map(found, "status"),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


# Words of the kubelet for a container that will not come up by waiting.
_TROUBLES = frozenset(
    {
        "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName",
        "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    }
)  # fmt: skip
COMMAND_NOT_FOUND = 127


def _trouble(container: Object) -> ContainerTrouble | None:
    waiting = _map(_map(container, "state"), "waiting")
    ended = _map(_map(container, "state"), "terminated") or _map(_map(container, "lastState"), "terminated")
    reason = str(waiting.get("reason") or "")
    restarts = _int(container.get("restartCount"))
    code = _int(ended.get("exitCode")) if ended else None
    missing = code == COMMAND_NOT_FOUND and not _map(_map(container, "state"), "running")
    if reason not in _TROUBLES and not missing:
        return None
    message = str(waiting.get("message") or ended.get("message") or "")
    return ContainerTrouble(str(container.get("name", "")), reason or "CommandNotFound", message, code, restarts)


def head_ip(pods: Iterable[PodSeen], cluster: str) -> str | None:
    """The address of a cluster's head: a pod's own, so that no Service that leads elsewhere can be asked instead."""
    heads = [pod for pod in pods if pod.head and pod.cluster == cluster and pod.running and pod.ip]
    standing = [pod for pod in heads if pod.delete_by is None]
    # The newest: that an older one is gone may have been missed while the API server was away.
    return max(standing, key=lambda pod: pod.created).ip if standing else None


def seconds(timestamp: object) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for what is none."""
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None


def timestamp(time: float) -> str:
    """RFC 3339, whole seconds, as Kubernetes writes it.

    Example: ``timestamp(0)`` is ``1970-01-01T00:00:00Z``
    """
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _map(found: Object, key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(found: Object, key: str) -> list[Mapping[str, Any]]:
    value = found.get(key)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _int(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return 0
