"""Runs on a Ray cluster that exists: several nodes, ``--address``."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import ray
from local import light, trained
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia.api.plan import Plan
from linckia_trainer import start
from linckia_trainer.groups import placement
from linckia_trainer.groups.placement import Placed

# Nodes that were taken away leave sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that takes no members; the tests add nodes."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": True, "dashboard_port": 0}
    head["dashboard_agent_listen_port"] = 0  # jobs need the head's agent, and another Ray here may have Ray's own port
    with light.cluster(head) as cluster:
        yield cluster
    patch.undo()


@pytest.fixture
def starving(cluster: Cluster) -> Iterator[None]:
    """A GPU node with no CPU to spare beside a CPU node."""
    nodes = [cluster.add_node(num_cpus=2, num_gpus=2), cluster.add_node(num_cpus=8, num_gpus=0)]
    yield
    ray.shutdown()
    for node in nodes:
        cluster.remove_node(node)
    light.await_processes(nodes)


@pytest.fixture(scope="module")
def eight_by_two(cluster: Cluster) -> None:
    """8 nodes of 2 GPUs and 6 CPUs."""
    for _ in range(8):
        cluster.add_node(num_cpus=6, num_gpus=2, wait=False)
    cluster.wait_for_nodes()


def connect(config: RunConfig, cluster: Cluster) -> Plan:
    """As ``--address`` does it."""
    ray.shutdown()
    return start.connect(config, cluster.address)


def nodes_of(placed: Placed, key: str) -> list[str]:
    found: dict[int, str] = placement_group_table(placed[key])["bundles_to_node_id"]
    return [found[bundle] for bundle in sorted(found)]


def gpu_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")}


def one_policy(members: int, **placement_keys: Any) -> RunConfig:
    """A run of ``members`` policy members, one engine and a reward function."""
    return light.config(
        policy=light.members(1, members),
        algorithm={"name": "grpo", "kl": {"coefficient": 0}},
        data={"prompts_per_step": 12, "samples_per_prompt": 2},
        reward={"function": "r.py:reward"},
        placement=placement_keys,
    )


def test_cpu_groups_never_starve_a_gpu_group_of_its_nodes_cpus(starving: None, cluster: Cluster) -> None:
    config = one_policy(1).model_dump()
    config["reward"] |= {"num_gpus_per_node": 6, "resources": {"strategy": "SPREAD"}}
    planned = connect(RunConfig.model_validate(config), cluster)
    # The witness: asked for first, the CPU group takes the GPU node's CPUs and the policy has no place.
    rewards = ray.util.placement_group([{"CPU": 1}] * 6, strategy="SPREAD")
    assert rewards.wait(10)
    assert gpu_nodes() & set(placement_group_table(rewards)["bundles_to_node_id"].values())
    with pytest.raises(UserError, match=r"these bundles have no place: (policy|rollout-0) \("):
        placement.place(planned, "placed", 1)
    ray.util.remove_placement_group(rewards)
    light.await_empty()

    _, placed = placement.place(planned, "placed", 20)
    assert {*nodes_of(placed, "policy"), *nodes_of(placed, "rollout-0")} == gpu_nodes()
    assert not gpu_nodes() & set(nodes_of(placed, "reward"))
    placement.release(placed)
    light.await_empty()


def test_no_cluster_at_the_address() -> None:
    ray.shutdown()
    with pytest.raises(UserError, match="no Ray cluster answers there"):
        start.connect(light.config(), "127.0.0.1:1")


def test_8_nodes_of_2_gpus_ranks_in_node_order(eight_by_two: None, cluster: Cluster) -> None:
    config = light.config(
        **{role: light.members(2, 2) for role in ("policy", "critic")},
        **{role: light.members(1, 2) for role in ("reference", "reward")},
        rollout={"engines": 2, "tensor_parallel_size": 2},
    )
    planned = connect(config, cluster)
    assert planned.gpus
    ordered, placed = placement.place(planned, "placed", 30)
    groups = light.start(ordered, placed)
    found = light.where(groups.values())
    taken = []
    for role in ("policy", "critic", "reference", "reward"):
        assert [one["rank"] for one in found[role]] == list(range(len(found[role])))
        nodes = [one["node"] for one in found[role]]
        assert [len(list(ranks)) for _, ranks in groupby(nodes)] == [2] * (len(nodes) // 2), role  # two ranks a node
        assert nodes == sorted(nodes)
        taken += [(one["node"], *one["gpus"]) for one in found[role]]
    for engine in range(2):
        devices = light.worker_devices(ordered.group(f"rollout-{engine}").members[0], placed)
        assert len({node for node, _ in devices}) == 1  # the devices of one engine are neighbours
        assert {node for node, _ in devices} == {one["node"] for one in found[f"rollout-{engine}"]}
        taken += [(node, *device) for node, device in devices]
    assert len(set(taken)) == len(taken) == 16
    for group in groups.values():
        group.kill()
    placement.release(placed)
    light.await_empty()


@pytest.mark.parametrize(
    ("strategy", "members", "num_nodes"),
    [("PACK", 2, 1), ("PACK", 4, 2), ("SPREAD", 4, 4), ("STRICT_PACK", 2, 1), ("STRICT_SPREAD", 6, 6)],
)
def test_strategies(strategy: str, members: int, num_nodes: int, eight_by_two: None, cluster: Cluster) -> None:
    planned = connect(one_policy(members, strategy=strategy), cluster)
    ordered, placed = placement.place(planned, "placed", 20)
    nodes = nodes_of(placed, "policy")
    assert len(set(nodes)) == num_nodes
    in_rank_order = [nodes[member.bundle] for member in ordered.group("policy").members]
    assert len(list(groupby(in_rank_order))) == num_nodes
    placement.release(placed)
    light.await_empty()


@pytest.mark.parametrize(("strategy", "members", "reason"), [
    ("STRICT_PACK", 3, "STRICT_PACK wants 3 bundles, 3 GPU, 3 CPU together, on one node"),
    ("STRICT_SPREAD", 12, "STRICT_SPREAD wants 12 bundles on 12 nodes and 8 can hold one"),
])  # fmt: skip
def test_strict_strategies_that_can_never_hold(
    strategy: str, members: int, reason: str, eight_by_two: None, cluster: Cluster
) -> None:
    planned = connect(one_policy(members, strategy=strategy), cluster)
    with pytest.raises(UserError, match=reason):
        placement.place(planned, "placed", 20)


def test_a_trained_group_over_two_nodes(eight_by_two: None, cluster: Cluster, tmp_path: Path) -> None:
    config = trained.config_of(tmp_path / "over", 2, placement={"device": "cpu", "strategy": "STRICT_SPREAD"})
    planned = connect(config, cluster)
    assert not planned.gpus  # as told, although there are some
    world = trained.stand(tmp_path, 2, ("policy", "critic"), placement={"strategy": "STRICT_SPREAD"})
    world.load("two-nodes")
    for group in world.groups.values():
        nodes = [status["node_id"] for status in group.status()]
        assert len(set(nodes)) == 2
        assert nodes == sorted(nodes)  # ranks in node order
    before = world.hashes()
    metrics = world.apply(trained.recorded(world, 1), 1)
    assert metrics["policy/grad_norm"] > 0
    assert world.hashes() != before
    world.remove()
    light.await_empty()
