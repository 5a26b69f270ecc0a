"""kopf, for watching alone: it lists and watches four kinds of objects, and every event wakes the runs it belongs to.

Nothing is written by kopf: no finalizer, no annotation, no event of its own, no peering.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kopf
from prometheus_client import start_http_server

from linckia.api.errors import UserError
from linckia.api.kubernetes import (
    CLUSTER_VARIABLE,
    GROUP,
    HEALTH_PORT,
    METRICS_PORT,
    NAMESPACE_VARIABLE,
    PLURAL,
    RAY_CLUSTER_LABEL,
    RAY_GROUP,
    RAY_VERSION,
    VERSION,
)
from linckia.api.names import TOKEN_VARIABLE
from linckia.kube import metrics
from linckia.kube.client import Client
from linckia.kube.look import Looker
from linckia.kube.reconcile import Reconciler
from linckia.kube.runner import Runner
from linckia.kube.world import Kind, World

RAY_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"  # Ray's own name for it; needed only where the Ray dashboard asks for a token
THREADS = 64  # reconciles at a time; they wait for answers most of the time

WATCHED: Mapping[Kind, tuple[str, ...]] = {
    "rayjobs": (RAY_GROUP, RAY_VERSION, "rayjobs"),
    "rayclusters": (RAY_GROUP, RAY_VERSION, "rayclusters"),
    "pods": ("", "v1", "pods"),
    "trainingruns": (GROUP, VERSION, PLURAL),
}


def run_operator(health_port: int = HEALTH_PORT, metrics_port: int = METRICS_PORT) -> None:
    """Watch until SIGTERM. Settings come from the environment; UserError for what is missing there or in the cluster."""
    namespace = _required(NAMESPACE_VARIABLE, "set it to the namespace of the RayJobs; the chart does")
    token = _required(TOKEN_VARIABLE, "give it the Secret that the RayJobs have; the chart does")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "httpcore", "kopf.objects", "kopf.activities"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    api = Client(namespace)
    if missing := api.missing_kinds():
        raise UserError(
            "Kubernetes",
            None,
            f"this cluster does not know {', '.join(missing)}",
            "install KubeRay 1.5 or newer (helm install kuberay-operator kuberay/kuberay-operator) and the chart's CRD "
            "(crds.enabled=true)",
        )
    world = World(os.environ.get(CLUSTER_VARIABLE, ""))
    reconciler = Reconciler(namespace, world, api, Looker(token, os.environ.get(RAY_TOKEN_VARIABLE, "")))
    start_http_server(metrics_port, registry=metrics.REGISTRY)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="reconcile") as pool:
        kopf.run(
            registry=watching(world, Runner(reconciler.reconcile, pool)),
            standalone=True,
            namespaces=[namespace],
            liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz",
        )


def watching(world: World, runner: Runner) -> kopf.OperatorRegistry:
    """The handlers: all that kopf is used for."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True  # needs no right to look at the whole cluster
        settings.watching.label_selectors["", "v1", "pods"] = RAY_CLUSTER_LABEL

    @kopf.on.cleanup(registry=registry)
    async def close(**_: Any) -> None:
        await runner.close()

    def watch(kind: Kind, selector: tuple[str, ...]) -> None:
        @kopf.on.event(*selector, registry=registry, id=kind)
        async def seen(event: Mapping[str, Any], **_: Any) -> None:
            runner.wake(world.seen(kind, event["object"], event["type"] == "DELETED"))

    for kind, selector in WATCHED.items():
        watch(kind, selector)
    return registry


def _required(variable: str, next_step: str) -> str:
    if value := os.environ.get(variable, ""):
        return value
    raise UserError(variable, None, "the operator needs it", next_step)
