"""A node of a cluster is lost with all that stands on it: its groups come back on the nodes that are left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.live import Live, assert_equal_runs, await_nothing_left, note_strikes, recoveries, stands, started
from local import light
from ray.cluster_utils import Cluster

from linckia_trainer.log.process import start_time

# Nodes that were taken away leave sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head that takes no members, and three nodes of which two are enough."""
    with light.cluster({"num_cpus": 0, "include_dashboard": False}, *[{"num_cpus": 4}] * 3) as cluster:
        yield cluster


def test_the_groups_of_a_lost_node_come_back_elsewhere(work: Path, golden: Path, cluster: Cluster) -> None:
    live: Live = started(work, "node_loss", "--address", cluster.address)
    try:
        view = live.await_view(
            lambda view: (
                view["stage"] == "update" and view["step"] >= 3 and all(stands(view, name) for name in view["groups"])
            ),
            "the third update",
        )
        struck = view["groups"]["policy"]["members"][0]["node_id"]
        lost = {
            name: shown["members"]
            for name, shown in view["groups"].items()
            if any(member["node_id"] == struck for member in shown["members"])
        }
        node = next(one for one in cluster.list_all_nodes() if one.node_id == struck)
        cluster.remove_node(node, allow_graceful=False)
        live.pace(3)
        healed = live.await_view(
            lambda view: all(
                shown["generation"] == (2 if name in lost else 1) and (stands(view, name) or name.startswith("rollout"))
                for name, shown in view["groups"].items()
            ),
            "all groups of the node healed",
            180,
        )
        live.pace(0)
        assert live.finish() == 0, live.said()
    finally:
        live.kill()
    assert "policy" in lost
    pids = [member["pid"] for members in lost.values() for member in members if member["node_id"] == struck]
    assert all(start_time(pid) is None for pid in pids)
    nodes = {member["node_id"] for shown in healed["groups"].values() for member in shown["members"]}
    assert struck not in nodes or not stands(healed, "policy")
    assert sorted(one["group"] for one in recoveries(live.place)) == sorted(lost)
    note_strikes("node loss", live.place, [(name, view["stage"], 1) for name in lost])
    assert_equal_runs(live.place, golden)
    await_nothing_left(live.place)
