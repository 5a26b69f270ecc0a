"""From a run config to what `kubectl apply` takes: a ConfigMap to read and a RayJob that trains. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from linckia.api.bundle import Bundle
from linckia.api.errors import UserError
from linckia.api.kubernetes import CONTROL_PORTS, RAY_CLUSTER_LABEL, RAY_GROUP, RAY_VERSION, RUN_LABEL
from linckia.api.names import BUNDLE, BUNDLE_VARIABLE

NAME_LENGTH = 47  # KubeRay makes longer names from a RayJob's: for its RayCluster, and from that for services and pods
RETRIES = 3  # of a self-contained RayJob: whole new clusters, each of which goes on from the run directory
_ON_KUBERNETES = {
    "control.host": "0.0.0.0",  # the beacon then tells the pod's own address
    "control.port": f"{CONTROL_PORTS[0]}-{CONTROL_PORTS[-1]}",
    "recovery.watcher": "operator",
}

Manifest = dict[str, Any]


def check_name(name: str) -> None:
    """UserError for a run name that cannot be a label, a RayJob and a TrainingRun at once."""
    if len(name) <= NAME_LENGTH and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        return
    raise UserError(
        "run.name",
        name,
        f"Kubernetes takes at most {NAME_LENGTH} small letters, digits and dashes, a letter or digit at both ends",
        f"set run.name={kubernetes_name(name)}",
    )


def kubernetes_name(text: str) -> str:
    """The nearest name that Kubernetes takes. Example: ``kubernetes_name("first_run.v2")`` is ``first-run-v2``"""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:NAME_LENGTH].strip("-") or "run"


def check_directory(directory: str) -> None:
    """UserError for a run directory that a pod would take with it when it goes."""
    if "://" not in directory and not directory.startswith("/"):
        raise UserError(
            "run.dir", directory, "is a folder of one pod, and goes with it",
            "set run.dir to a bucket, such as s3://my-bucket/runs/{name}, or to a volume that every pod mounts",
        )  # fmt: skip


def on_kubernetes(written: Mapping[str, Any], own_cluster: bool) -> list[str]:
    """Overrides for what a pod has to have otherwise than one machine, as far as the config does not say it itself.

    The operator leaves a run on a cluster of its own alone, so such a run watches itself.
    """
    found = []
    for key, value in _ON_KUBERNETES.items():
        section, _, name = key.partition(".")
        if name not in (written.get(section) or {}) and not (own_cluster and section == "recovery"):
            found.append(f"{key}={value}")
    return found


def entrypoint(overrides: Sequence[str]) -> str:
    """The command of the RayJob's driver.

    Example: ``linckia train bundle: run.name=sort --address auto --supervise --takeover``
    """
    return shlex.join(["linckia", "train", BUNDLE, *overrides, "--address", "auto", "--supervise", "--takeover"])


def config_map(name: str, namespace: str | None, bundle: Bundle) -> Manifest:
    """The config and its code for people to read; the RayJob carries its own copy and nothing reads this one."""
    files = {path.replace("/", "_"): text for path, text in bundle.files.items() if not path.endswith(".jsonl")}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, namespace), "data": files}


def ray_job(
    name: str,
    namespace: str | None,
    bundle: Bundle,
    overrides: Sequence[str],
    cluster: str | None = None,
    cluster_spec: Mapping[str, Any] | None = None,
) -> Manifest:
    """The RayJob: on the RayCluster called ``cluster``, or with one of its own made from ``cluster_spec``.

    On a shared cluster KubeRay must not retry, for its retry deletes the cluster: the operator goes on with the run. With a
    cluster of its own the retry is a whole new cluster, and the same command goes on from the run directory.
    """
    assert (cluster is None) != (cluster_spec is None)
    spec: Manifest = {"entrypoint": Folded(entrypoint(overrides))}
    if cluster is not None:
        spec |= {"clusterSelector": {RAY_CLUSTER_LABEL: cluster}, "submissionMode": "HTTPMode", "backoffLimit": 0}
    else:
        spec |= {"submissionMode": "SidecarMode", "backoffLimit": RETRIES, "shutdownAfterJobFinishes": True}
    environment = yaml.safe_dump({"env_vars": {BUNDLE_VARIABLE: bundle.pack()}}, width=1_000_000)
    spec["runtimeEnvYAML"] = environment
    if cluster_spec is not None:
        spec["rayClusterSpec"] = dict(cluster_spec)
    return {
        "apiVersion": f"{RAY_GROUP}/{RAY_VERSION}",
        "kind": "RayJob",
        "metadata": _metadata(name, namespace),
        "spec": spec,
    }


def to_yaml(manifests: Sequence[Manifest], comment: str) -> str:
    """All of them as one file to apply, under a comment of some lines."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in manifests)


class Folded(str):
    """One long line, written as several."""


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, so that a person can read it."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Folded, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">"))


def _metadata(name: str, namespace: str | None) -> Manifest:
    found: Manifest = {"name": name, "labels": {RUN_LABEL: name}}
    return found if namespace is None else {"name": name, "namespace": namespace, "labels": {RUN_LABEL: name}}
