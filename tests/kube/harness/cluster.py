"""A whole Kubernetes on this machine for as long as a ``with`` block lasts: control plane, nodes, names, KubeRay.

Example::

    with cluster(num_nodes=2) as kube:
        kube.kubectl("get", "nodes")
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kube.harness import cgroups, images, network, pki
from kube.harness.build import PARTS, Parts, build
from kube.harness.network import Network
from kube.harness.node import Node, boot
from kube.harness.processes import command, kill, start, wait_for

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"


@dataclass
class Cluster:
    """A cluster that stands. ``kubeconfig`` is the administrator's."""

    parts: Parts
    network: Network
    folder: Path
    kubeconfig: Path
    nodes: list[Node] = field(default_factory=list)

    @property
    def cgroup(self) -> str:
        """Of the control plane."""
        return f"{self.network.name}-control"

    @property
    def server(self) -> str:
        return f"https://{self.network.control_plane}:6443"

    def start(self, name: str, *words: str | Path) -> int:
        """One process of the control plane; returns its pid."""
        log = self.folder / "logs" / f"{name}.log"
        return start(log, *words, namespace=self.network.name, cgroup=self.cgroup)

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return command(self.parts.binary("kubectl"), "--kubeconfig", self.kubeconfig, *words, stdin=stdin, check=check)

    def helm(self, *words: str | Path, check: bool = True) -> str:
        return command(self.parts.binary("helm"), "--kubeconfig", self.kubeconfig, *words, check=check)

    def get(self, *words: str) -> dict[str, Any]:
        """What ``kubectl get ... -o json`` prints; RuntimeError if there is no such object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))


@contextmanager
def cluster(num_nodes: int = 2, kuberay: bool = True) -> Iterator[Cluster]:
    """Build what is missing, start a cluster, and leave nothing of it behind."""
    made = up(num_nodes, kuberay)
    try:
        yield made
    finally:
        down(made.network.name, made.folder)


def up(num_nodes: int = 2, kuberay: bool = True) -> Cluster:
    parts = build()
    images.make(parts)
    net = network.free_network()
    folder = Path(tempfile.mkdtemp(prefix=f"{net.name}-"))
    made = Cluster(parts, net, folder, folder / "kubeconfig")
    try:
        network.make(net, num_nodes)
        cgroups.make(made.cgroup)
        _start_control_plane(made)
        made.nodes = [Node(i, f"node-{'abcdefgh'[i]}", net, folder / f"node-{i}") for i in range(num_nodes)]
        wanted = (*(("pause", "base", "kuberay") if kuberay else ("pause", "base")),)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: boot(node, parts, folder / "pki", made.server, wanted), made.nodes))
        _start_names(made)
        wait_for("every node", lambda: len(_ready_nodes(made)) == num_nodes, 60)
        if kuberay:
            _install_kuberay(made)
    except BaseException:
        down(made.network.name, made.folder)
        raise
    return made


def down(network_name: str, folder: Path) -> None:
    """Every process, mount, cgroup, namespace and file of a cluster, also of one that stands half."""
    groups = cgroups.names(f"{network_name}-")
    kill([pid for group in groups for pid in cgroups.pids(group)])
    places = [folder, *Path("/run").glob(f"{network_name}-node-*")]
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        target = Path(line.split()[1])
        if any(target.is_relative_to(place) for place in places):
            command("umount", "--lazy", target, check=False)
    for group in groups:
        cgroups.remove(group)
    network.remove(network_name)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def _start_control_plane(made: Cluster) -> None:
    here, pods = made.network.control_plane, made.folder / "pki"
    pki.make_authority(pods)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    addresses = ["127.0.0.1", API_SERVICE, here]
    pki.issue(pods, "apiserver", "/CN=kube-apiserver", [f"DNS:{n}" for n in names] + [f"IP:{a}" for a in addresses])
    pki.issue(pods, "admin", "/O=system:masters/CN=admin", ["DNS:admin"])
    pki.kubeconfig(pods, "admin", made.server, made.kubeconfig)

    run, binary = made.start, made.parts.binary
    run("etcd", "etcd", "--data-dir", made.folder / "etcd", "--unsafe-no-fsync",
        "--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
        "--listen-peer-urls", "http://127.0.0.1:2380")  # fmt: skip
    start_api_server(made)
    run("controller-manager", binary("kube-controller-manager"), "--kubeconfig", made.kubeconfig,
        f"--service-account-private-key-file={pods}/sa.key", f"--root-ca-file={pods}/ca.crt",
        "--use-service-account-credentials", f"--cluster-signing-cert-file={pods}/ca.crt",
        f"--cluster-signing-key-file={pods}/ca.key", "--node-monitor-grace-period=20s", "--leader-elect=false")  # fmt: skip
    run("scheduler", binary("kube-scheduler"), "--kubeconfig", made.kubeconfig, "--leader-elect=false")
    wait_for("the API server", lambda: made.kubectl("get", "--raw", "/readyz") == "ok", 60)


def start_api_server(made: Cluster) -> int:
    """Apart from the rest, so that a test can stop it and start it again; returns its pid."""
    here, pods = made.network.control_plane, made.folder / "pki"
    return made.start(
        "apiserver", made.parts.binary("kube-apiserver"),
        "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", f"--advertise-address={here}",
        f"--service-cluster-ip-range={SERVICES}", "--authorization-mode=Node,RBAC", "--allow-privileged=true",
        f"--tls-cert-file={pods}/apiserver.crt", f"--tls-private-key-file={pods}/apiserver.key",
        f"--client-ca-file={pods}/ca.crt", f"--service-account-key-file={pods}/sa.pub",
        f"--service-account-signing-key-file={pods}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--kubelet-client-certificate={pods}/admin.crt", f"--kubelet-client-key={pods}/admin.key",
        "--kubelet-preferred-address-types=InternalIP", "--enable-admission-plugins=NodeRestriction",
    )  # fmt: skip


def _start_names(made: Cluster) -> None:
    file = made.folder / "Corefile"
    file.write_text(f""".:53 {{
  bind {made.network.control_plane}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {made.kubeconfig} tests
    ttl 5
  }}
  cache 5
}}
""")
    made.start("coredns", made.parts.binary("coredns"), "-conf", file)


def _ready_nodes(made: Cluster) -> list[str]:
    return [
        node["metadata"]["name"]
        for node in made.get("nodes")["items"]
        if any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", ()))
    ]


def fake_gpus(made: Cluster, node: Node, number: int) -> None:
    """The scheduler and Ray then count so many GPUs on the node; there are none."""
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(number)}]
    made.kubectl("patch", "node", node.name, "--subresource=status", "--type=json", "-p", json.dumps(patch))


def _install_kuberay(made: Cluster) -> None:
    """KubeRay's own manifests, with our image of its unmodified operator."""
    config = _kuberay_source() / "config"
    made.kubectl("apply", "--server-side", "-k", str(config / "default"))
    image = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "localhost/kuberay:1"},
             {"op": "add", "path": "/spec/template/spec/containers/0/imagePullPolicy", "value": "Never"}]  # fmt: skip
    made.kubectl("patch", "deployment", "kuberay-operator", "--type=json", "-p", json.dumps(image))
    made.kubectl("rollout", "status", "deployment/kuberay-operator", "--timeout=60s")


def _kuberay_source() -> Path:
    """Where Go keeps the module that was built."""
    module = "github.com/ray-project/kuberay/ray-operator"
    found = command("go", "list", "-C", PARTS / "kuberay", "-m", "-f", "{{.Dir}}", module)
    return Path(found.strip())


def kubeconfig_from_environment() -> Path | None:
    """The cluster of ``LINCKIA_KUBECONFIG``, to run the same tests against."""
    path = os.environ.get("LINCKIA_KUBECONFIG")
    return Path(path) if path else None
