"""One node: containerd, kubelet and kube-proxy in the node's own network namespace, below a cgroup of its own."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from kube.harness import cgroups, pki
from kube.harness import network as networks
from kube.harness.build import Parts
from kube.harness.network import Network
from kube.harness.processes import command, start, wait_for

IMAGES = ("pause", "base")


@dataclass
class Node:
    """``folder`` holds what it writes; ``cgroup`` everything that runs on it, pods too."""

    number: int
    name: str
    network: Network
    folder: Path

    @property
    def cgroup(self) -> str:
        return f"{self.network.name}-{self.name}"

    @property
    def socket(self) -> Path:
        """Short, since a socket's path is at most 107 bytes."""
        return Path(f"/run/{self.cgroup}/containerd.sock")

    def ctr(self, *words: str | Path) -> str:
        return command("ctr", "-a", self.socket, "-n", "k8s.io", *words)

    def cut_off(self) -> None:
        networks.connect(self.network, self.number, up=False)

    def plug_in(self) -> None:
        networks.connect(self.network, self.number, up=True)

    def pids(self) -> list[int]:
        """Every process of the node's cgroup: kubelet, containerd and all that run in its pods."""
        return cgroups.pids(self.cgroup)


def boot(node: Node, parts: Parts, certificates: Path, server: str, images: tuple[str, ...] = IMAGES) -> None:
    """Start it and import its images; it joins the cluster within a few seconds."""
    node.folder.mkdir(parents=True)
    space, address = node.network.namespace(node.number), node.network.node_address(node.number)
    pki.issue(
        certificates, node.name, f"/O=system:nodes/CN=system:node:{node.name}", [f"DNS:{node.name}", f"IP:{address}"]
    )
    kubeconfig = pki.kubeconfig(certificates, node.name, server, node.folder / "kubeconfig")
    cgroups.make(node.cgroup)
    _write_containerd(node)
    _write_kubelet(node, certificates)
    _write_proxy(node, certificates, server)
    (node.folder / "resolv.conf").write_text(f"nameserver {node.network.control_plane}\n")

    def run(name: str, *words: str | Path) -> None:
        start(node.folder / f"{name}.log", *words, namespace=space, cgroup=node.cgroup)

    run("containerd", "containerd", "-c", node.folder / "containerd.toml")
    wait_for(f"containerd of {node.name}", lambda: node.ctr("version"), 30)
    for image in images:
        node.ctr("images", "import", parts.image(image))
    run("kube-proxy", parts.binary("kube-proxy"), "--config", node.folder / "proxy.yaml")
    run("kubelet", parts.binary("kubelet"), "--config", node.folder / "kubelet.yaml", "--kubeconfig", kubeconfig,
        "--root-dir", node.folder / "kubelet", "--hostname-override", node.name, "--node-ip", address,
        "--cert-dir", node.folder / "pki")  # fmt: skip


def _write_containerd(node: Node) -> None:
    network = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True,
                "ipam": {
                    "type": "host-local", "dataDir": str(node.folder / "ipam"), "routes": [{"dst": "0.0.0.0/0"}],
                    "ranges": [[{"subnet": node.network.pod_subnet(node.number)}]],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }  # fmt: skip
    (node.folder / "cni").mkdir()
    (node.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
    node.socket.parent.mkdir(parents=True, exist_ok=True)
    (node.folder / "containerd.toml").write_text(f"""version = 2
root = "{node.folder}/containerd"
state = "{node.socket.parent}"
[grpc]
  address = "{node.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node.folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
""")


def _write_kubelet(node: Node, certificates: Path) -> None:
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "cgroupsPerQOS": True,
        "clusterDNS": [node.network.control_plane],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failSwapOn": False,
        "featureGates": {"KubeletInUserNamespace": True},  # no writing of kernel settings
        "nodeStatusUpdateFrequency": "4s",
        "resolvConf": str(node.folder / "resolv.conf"),
        "tlsCertFile": str(certificates / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(certificates / f"{node.name}.key"),
    }
    (node.folder / "kubelet.yaml").write_text(yaml.safe_dump(config))


def _write_proxy(node: Node, certificates: Path, server: str) -> None:
    kubeconfig = pki.kubeconfig(certificates, "admin", server, node.folder / "proxy.kubeconfig")
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": "10.244.0.0/16",
        "hostnameOverride": node.name,
        "conntrack": {"maxPerCore": 0, "min": 0},
        "healthzBindAddress": f"{node.network.node_address(node.number)}:10256",
    }
    (node.folder / "proxy.yaml").write_text(yaml.safe_dump(config))
