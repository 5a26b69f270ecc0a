"""The objects of our namespace as they stand, kept up to date by watch events; read by every reconcile.

Records are kept, not whole objects: of thousands of pods a few fields are needed. kopf's own indices keep all of it.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from linckia.observe.kubernetes import (
    PodSeen,
    RayClusterSeen,
    RayJobSeen,
    TrainingRunSeen,
    pod_seen,
    ray_cluster_seen,
    ray_job_seen,
    training_run_seen,
)

Kind = Literal["rayjobs", "rayclusters", "pods", "trainingruns"]


class World:
    """``only_cluster``: the one RayCluster to look after; empty for all. Safe to use from several threads."""

    def __init__(self, only_cluster: str = "") -> None:
        self.only_cluster = only_cluster
        self._lock = threading.Lock()
        self._jobs: dict[str, RayJobSeen] = {}
        self._clusters: dict[str, RayClusterSeen] = {}
        self._pods: defaultdict[str, dict[str, PodSeen]] = defaultdict(dict)  # by RayCluster
        self._training_runs: dict[str, TrainingRunSeen] = {}

    def seen(self, kind: Kind, found: Mapping[str, Any], deleted: bool = False) -> set[str]:
        """Take in one object of a watch event; the runs whose reconcile may come out otherwise now."""
        with self._lock:
            if kind == "rayjobs":
                job = ray_job_seen(found)
                before = self._jobs.get(job.name)
                _put(self._jobs, job.name, job, deleted)
                return {one.run for one in (before, job) if one is not None and one.run}
            if kind == "rayclusters":
                cluster = ray_cluster_seen(found)
                _put(self._clusters, cluster.name, cluster, deleted)
                return self._runs_on(cluster.name)
            if kind == "pods":
                pod = pod_seen(found)
                _put(self._pods[pod.cluster], pod.name, pod, deleted)
                return self._runs_on(pod.cluster)
            training_run = training_run_seen(found)
            _put(self._training_runs, training_run.name, training_run, deleted)
            return {training_run.name} if any(job.run == training_run.name for job in self._jobs.values()) else set()

    def jobs_of(self, run: str) -> list[RayJobSeen]:
        """The RayJobs of a run on RayClusters that we look after."""
        with self._lock:
            found = [job for job in self._jobs.values() if job.run == run]
        return [job for job in found if not self.only_cluster or job.cluster == self.only_cluster]

    def cluster(self, name: str | None) -> RayClusterSeen | None:
        with self._lock:
            return self._clusters.get(name or "")

    def pods_of(self, cluster: str | None) -> list[PodSeen]:
        with self._lock:
            return list(self._pods.get(cluster or "", {}).values())

    def training_run(self, name: str) -> TrainingRunSeen | None:
        with self._lock:
            return self._training_runs.get(name)

    def forget_job(self, name: str) -> None:
        """It is gone, and the event that said so was missed."""
        with self._lock:
            self._jobs.pop(name, None)

    def forget_training_run(self, name: str) -> None:
        with self._lock:
            self._training_runs.pop(name, None)

    def _runs_on(self, cluster: str) -> set[str]:
        return {job.run for job in self._jobs.values() if job.run and job.cluster == cluster}


def _put(records: dict[str, Any], name: str, record: object, deleted: bool) -> None:
    if deleted:
        records.pop(name, None)
    else:
        records[name] = record
