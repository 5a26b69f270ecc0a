"""A RayCluster, its Ray head, its controller and the API server, written by hand: what the operator asks is answered here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from linckia.api.config import Recovery
from linckia.api.kubernetes import RAY_CLUSTER_LABEL, RUN_LABEL
from linckia.api.names import API_VERSION, beacon_name
from linckia.decide.limits import WatchPolicy, policy_to_json
from linckia.kube.client import ApiError
from linckia.kube.look import Looker
from linckia.kube.reconcile import Reconciler
from linckia.kube.world import World

RUN = "first-run"
TOKEN = "a-token-nobody-guesses"
HEAD, WORKER = "10.1.0.2", "10.1.0.3"
CONTROL = f"{HEAD}:8470"
NOW = 1_800_000_000.0


def ray_job(name: str = RUN, **status: Any) -> dict[str, Any]:
    """A RayJob on the cluster ``gpu``. Keys of ``metadata`` and ``spec`` in mappings of these names."""
    metadata, spec = status.pop("metadata", {}), status.pop("spec", {})
    return {
        "metadata": {
            "name": name,
            "namespace": "train",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {RUN_LABEL: RUN},
            **metadata,
        },
        "spec": {
            "entrypoint": "linckia train /config/run.yaml --supervise --takeover",
            "clusterSelector": {RAY_CLUSTER_LABEL: "gpu"},
            **spec,
        },
        "status": {
            "rayClusterName": "gpu",
            "jobId": f"{name}-id",
            "jobStatus": "RUNNING",
            "jobDeploymentStatus": "Running",
            **status,
        },
    }


def pod(name: str, ip: str, kind: str = "worker", **more: Any) -> dict[str, Any]:
    metadata, status = more.pop("metadata", {}), more.pop("status", {})
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {RAY_CLUSTER_LABEL: "gpu", "ray.io/node-type": kind},
            **metadata,
        },
        "spec": {"nodeName": "node-a"},
        "status": {"phase": "Running", "podIP": ip, **status},
    }


def view(**more: Any) -> dict[str, Any]:
    """What a controller in step 12 of 100 answers."""
    return {
        "api_version": API_VERSION,
        "run": RUN,
        "uri": "s3://runs/first-run",
        "attempt": 1,
        "step": 12,
        "steps": 100,
        "stage": "update",
        "stopping": False,
        "log_head": 11,
        "last_checkpoint": 10,
        "groups": {
            "policy": {"generation": 2, "members": [{}, {}], "standbys": 1, "returning": False, "restarts_left": 4},
            "rollout-0": {"generation": 1, "members": [{"weight_version": [11, 2]}], "returning": False},
        },
        "heard": {
            "seconds_ago": 0.5,
            "groups": {
                "policy": {"generation": 2, "members": [{"generation": 2, "stage": "update", "progress": 1}, None]}
            },
        },
        "watch": policy_to_json(WatchPolicy(Recovery(watcher="operator"))),
        "recoveries": [],
        "recoveries_total": 0,
        "recoveries_seconds": 0.0,
        "held_out_score": 0.25,
        "seconds_left": 1234.0,
        "warnings": [],
    } | more


@dataclass
class FakeRay:
    """The Ray head and the controller. ``actors``: (name, state); None: the head does not answer."""

    actors: list[tuple[str, str]] | None = field(
        default_factory=lambda: [
            (beacon_name(RUN, 1, HEAD, 8470), "ALIVE"),
            (f"_ray_internal_job_actor_{RUN}-id", "ALIVE"),
        ]
    )
    view: dict[str, Any] | httpx.Response | None = field(default_factory=view)
    job: str | None = "RUNNING"  # None: Ray knows no such job
    after_stop: str | None = "FAILED"
    order: int = 202
    asked: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if request.url.host not in (HEAD, WORKER):
            raise AssertionError(f"{request.url} is not of this cluster")
        if request.url.port == 8265:
            return self._head(request)
        if self.view is None or f"{request.url.host}:{request.url.port}" != CONTROL:
            raise httpx.ConnectError("refused", request=request)
        if request.headers.get("X-Linckia-Token") != TOKEN:
            return httpx.Response(403)
        if request.method == "POST":
            return httpx.Response(self.order, json={"accepted": True})
        return self.view if isinstance(self.view, httpx.Response) else httpx.Response(200, json=self.view)

    def _head(self, request: httpx.Request) -> httpx.Response:
        if self.actors is None:
            raise httpx.ConnectTimeout("no answer", request=request)
        path, parameters = request.url.path, request.url.params
        if path == "/api/v0/actors":
            wanted = parameters.get("filter_values") if parameters.get("filter_keys") == "name" else None
            rows = [
                {"name": name, "state": state, "pid": 7, "node_id": "n1"}
                for name, state in self.actors
                if (name == wanted if wanted else not name.startswith("_ray"))
            ]
            return _listed(rows)
        if path == "/api/v0/nodes":
            return _listed([{"node_id": "n1", "node_ip": HEAD, "state": "ALIVE"}])
        if self.job is None:
            return httpx.Response(404, text="no such job")
        if request.method == "POST":
            self.job = self.after_stop
            return httpx.Response(200, json={"stopped": False})
        return httpx.Response(200, json={"status": self.job})

    def paths(self, method: str) -> list[str]:
        return [request.url.path for request in self.asked if request.method == method]


def _listed(rows: list[dict[str, Any]]) -> httpx.Response:
    inner = {"num_filtered": len(rows), "result": rows}
    return httpx.Response(200, json={"result": True, "msg": "", "data": {"result": inner}})


class FakeApi:
    """The API server: every write is noted, and shown to the worlds that watch."""

    def __init__(self, *worlds: World) -> None:
        self.worlds = list(worlds)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.training_runs: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.away = False

    def put_job(self, found: dict[str, Any]) -> None:
        """As a person or KubeRay writes it."""
        self.jobs[found["metadata"]["name"]] = found
        self._show("rayjobs", found)

    def remove_job(self, name: str, told: bool = True) -> None:
        found = self.jobs.pop(name)
        if told:
            self._show("rayjobs", found, True)

    def get_ray_job(self, name: str) -> dict[str, Any] | None:
        self._answer()
        return self.jobs.get(name)

    def create_ray_job(self, manifest: dict[str, Any]) -> bool:
        name = self._write("create RayJob", manifest["metadata"]["name"])
        if name in self.jobs:
            return False
        metadata = {**manifest["metadata"], "uid": f"uid-{name}", "creationTimestamp": "2027-01-15T08:00:00Z"}
        self.put_job({**manifest, "metadata": metadata})
        return True

    def delete_ray_job(self, name: str, uid: str) -> bool:
        self._write("delete RayJob", name)
        if self.jobs.get(name, {}).get("metadata", {}).get("uid") != uid:
            return False
        self.remove_job(name)
        return True

    def create_training_run(self, manifest: dict[str, Any]) -> bool:
        name = self._write("create TrainingRun", manifest["metadata"]["name"])
        if name in self.training_runs:
            return False
        found = {**manifest, "metadata": {**manifest["metadata"], "uid": f"uid-trun-{name}"}}
        self.training_runs[name] = found
        self._show("trainingruns", found)
        return True

    def patch_status(self, name: str, patch: dict[str, Any]) -> bool:
        self._write("patch status", name)
        if name not in self.training_runs:
            return False
        status = {**self.training_runs[name].get("status", {}), **patch["status"]}
        self.training_runs[name] = self.training_runs[name] | {
            "status": {key: value for key, value in status.items() if value is not None}
        }
        self._show("trainingruns", self.training_runs[name])
        return True

    def create_event(self, manifest: dict[str, Any]) -> bool:
        name = self._write("create Event", manifest["metadata"]["name"])
        new = name not in self.events
        self.events.setdefault(name, manifest)
        return new

    def reasons(self) -> list[str]:
        return [one["reason"] for one in self.events.values()]

    def _write(self, what: str, name: str) -> str:
        self._answer()
        self.writes.append(f"{what} {name}")
        return name

    def _answer(self) -> None:
        if self.away:
            raise ApiError("the API server does not answer (ConnectTimeout)")

    def _show(self, kind: Any, found: Mapping[str, Any], deleted: bool = False) -> None:
        for world in self.worlds:
            world.seen(kind, found, deleted)


class FakeCluster:
    """One run on one RayCluster with head and worker, and an operator that looks after it."""

    def __init__(self, *jobs: dict[str, Any], only_cluster: str = "") -> None:
        self.now = NOW
        self.ray = FakeRay()
        self.world = World(only_cluster)
        self.api = FakeApi(self.world)
        self.reconciler = self.operator(self.world)
        for job in jobs or (ray_job(),):
            self.api.put_job(job)
        self.see(
            "rayclusters",
            {"metadata": {"name": "gpu"}, "status": {"readyWorkerReplicas": 1, "desiredWorkerReplicas": 1}},
        )
        self.see("pods", pod("gpu-head-a1", HEAD, "head"))
        self.see("pods", pod("gpu-worker-b2", WORKER))

    def operator(self, world: World) -> Reconciler:
        return Reconciler(
            "train", world, self.api, Looker(TOKEN, transport=httpx.MockTransport(self.ray)),
            now=lambda: self.now, clock=lambda: self.now,
        )  # fmt: skip

    def second_operator(self) -> Reconciler:
        """Another one beside the first, with a world of its own that has seen the same."""
        world = World()
        for job in self.api.jobs.values():
            world.seen("rayjobs", job)
        for found in self.api.training_runs.values():
            world.seen("trainingruns", found)
        world.seen("pods", pod("gpu-head-a1", HEAD, "head"))
        self.api.worlds.append(world)
        return self.operator(world)

    def see(self, kind: Any, found: dict[str, Any], deleted: bool = False) -> None:
        for world in self.api.worlds:
            world.seen(kind, found, deleted)

    def reconcile(self, times: int = 1, seconds: float = 2.0) -> float | None:
        pause: float | None = None
        for _ in range(times):
            pause = self.reconciler.reconcile(RUN)
            self.now += seconds
        return pause

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.training_runs[RUN]["status"]
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        return next(one for one in self.status["conditions"] if one["type"] == kind)

    def lose_head(self) -> None:
        """The head is replaced, Redis kept its memory: driver, beacon and supervisor are gone, the job says RUNNING."""
        assert self.ray.actors is not None
        self.ray.actors = [(name, "DEAD") for name, _ in self.ray.actors]
        self.ray.view = None
