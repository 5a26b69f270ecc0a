"""The network of one cluster: a namespace for the control plane with a bridge, one for each node, a line to each.

Nothing in it reaches beyond this machine, two clusters do not meet, and a node is cut off by taking its line down. This
machine itself has one address on the bridge, so that ``kubectl`` works as anywhere.
"""

import re
from dataclasses import dataclass

from kube.harness.processes import command

BRIDGE = "br0"


@dataclass(frozen=True)
class Network:
    """Addresses of cluster number ``number``. Example: ``Network("lk0", 0).control_plane`` is ``10.200.0.1``."""

    name: str
    number: int

    @property
    def prefix(self) -> str:
        return f"10.{200 + self.number}.0"

    @property
    def control_plane(self) -> str:
        return f"{self.prefix}.1"

    @property
    def outside(self) -> str:
        """The address of this machine, as seen from the cluster."""
        return f"{self.prefix}.254"

    def namespace(self, node: int) -> str:
        return f"{self.name}-n{node}"

    def node_address(self, node: int) -> str:
        return f"{self.prefix}.{10 + node}"

    def pod_subnet(self, node: int) -> str:
        return f"10.244.{node}.0/24"


def free_network() -> Network:
    """The first cluster number whose namespace and addresses nobody has."""
    taken = command("ip", "netns", "list") + command("ip", "-4", "addr")
    for number in range(50):
        network = Network(f"lk{number}", number)
        if not re.search(rf"\b{network.name}\b", taken) and f"{network.prefix}." not in taken:
            return network
    raise RuntimeError("50 clusters stand; take some down with make kube-down")


def make(network: Network, num_nodes: int) -> None:
    command("ip", "netns", "add", network.name)
    _inside(network.name, "ip link set lo up", f"ip link add {BRIDGE} type bridge", f"ip link set {BRIDGE} up",
            f"ip addr add {network.control_plane}/24 dev {BRIDGE}",
            f"ip route add default dev {BRIDGE} src {network.control_plane}", "sysctl -qw net.ipv4.ip_forward=1")  # fmt: skip
    _join(network, "out", f"{network.name}h", None)
    command("ip", "addr", "add", f"{network.outside}/24", "dev", f"{network.name}h")
    command("ip", "link", "set", f"{network.name}h", "up")
    for node in range(num_nodes):
        space = network.namespace(node)
        command("ip", "netns", "add", space)
        _join(network, f"n{node}", "eth0", space)
        _inside(space, "ip link set lo up", "ip link set eth0 up", "sysctl -qw net.ipv4.ip_forward=1",
                f"ip addr add {network.node_address(node)}/24 dev eth0",
                f"ip route add default via {network.control_plane}")  # fmt: skip
    for here in [network.name, *map(network.namespace, range(num_nodes))]:
        for node in range(num_nodes):
            if here != network.namespace(node):
                _inside(here, f"ip route add {network.pod_subnet(node)} via {network.node_address(node)}")


def connect(network: Network, node: int, up: bool) -> None:
    """Plug a node in, or cut it off: neither its kubelet nor its pods reach anything then."""
    _inside(network.name, f"ip link set n{node} {'up' if up else 'down'}")


def remove(name: str) -> None:
    """All of a cluster's network; what is not there is no error."""
    command("ip", "link", "del", f"{name}h", check=False)
    for line in command("ip", "netns", "list").splitlines():
        space = line.split()[0]
        if space == name or space.startswith(f"{name}-n"):
            command("ip", "netns", "del", space)


def _join(network: Network, here: str, there: str, space: str | None) -> None:
    peer = ["netns", space] if space else ["netns", "1"]
    command("ip", "link", "add", here, "netns", network.name, "type", "veth", "peer", "name", there, *peer)
    _inside(network.name, f"ip link set {here} master {BRIDGE}", f"ip link set {here} up")


def _inside(space: str, *lines: str) -> None:
    for line in lines:
        command(*line.split(), namespace=space)
