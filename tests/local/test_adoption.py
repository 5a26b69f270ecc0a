"""Adoption on a real cluster: the next attempt works on with the members that the killed one left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from local import abandoned, bits, light, tiny
from ray.cluster_utils import Cluster

from linckia.api.access import find_token, read_run_file
from linckia.api.errors import FencedError
from linckia.api.names import TOKEN_HEADER
from linckia_trainer import adopt, start
from linckia_trainer.groups import leftovers, placement
from linckia_trainer.groups.fence import still_runs
from linckia_trainer.log.store import Store

# Nodes that were taken away leave sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = 6
START_SECONDS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that takes no members, and a node."""
    with light.cluster(abandoned.HEAD, {"num_cpus": 16}) as cluster:
        yield cluster


@pytest.fixture
def left_behind(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """What a controller of light members left when it was killed; its run directory. We are connected to the cluster."""
    with subprocess.Popen(
        [sys.executable, abandoned.__file__, cluster.address, str(tmp_path), "900"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        controller.kill()
    start.connect(abandoned.config_of(str(tmp_path), 900), cluster.address)
    yield tmp_path
    leftovers.remove(abandoned.RUN, Store(str(tmp_path)))
    if (keeper := leftovers.find(f"{abandoned.RUN}/keeper")) is not None:
        ray.kill(keeper)
    light.await_empty()
    ray.shutdown()


def pids(groups: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [one["pid"] for one in group.status()] for name, group in groups.items()}


def test_groups_that_stand_are_taken_over_and_the_rest_is_killed(left_behind: Path, cluster: Cluster) -> None:
    config, store = abandoned.config_of(str(left_behind), 900), Store(str(left_behind))
    planned = start.plan(config, False)
    names = {group.name for group in planned.groups}
    listed = leftovers.listed_processes(store)

    second = adopt.adopt(config, planned, store, 2, abandoned.WORD)  # the policy is busy until it hears of attempt 2
    assert second is not None
    assert second.groups.keys() == names
    assert second.placed.keys() == {one.key for one in planned.placement_groups}
    assert second.unplaced == {}
    before = pids(second.groups)
    assert {pid for ranks in before.values() for pid in ranks} <= {one["pid"] for one in listed}
    # What waited for a place is no group of ours, and gone.
    light.await_true(lambda: {name for name, _ in leftovers.standing_members(abandoned.RUN)} == names)
    light.await_true(lambda: len(placement.standing_groups(abandoned.RUN)) == len(planned.placement_groups))

    # One rank of two dies with its controller: the group goes, its places stay, the others work on.
    os.kill(before["policy"][1], signal.SIGKILL)
    third = adopt.adopt(config, planned, store, 3, abandoned.WORD)
    assert third is not None
    assert third.groups.keys() == names - {"policy"}
    assert pids(third.groups) == {name: ranks for name, ranks in before.items() if name != "policy"}
    assert {key: one.id for key, one in third.placed.items()} == {key: one.id for key, one in second.placed.items()}
    assert not any(still_runs(one) for one in listed if one["pid"] in before["policy"])
    assert {group.name: group.members for group in third.plan.groups} == {
        group.name: group.members for group in second.plan.groups
    }
    with pytest.raises(FencedError, match="attempt 2 was replaced by attempt 3"):
        second.groups["critic"].call("where")

    # Another config or origin would have loaded something else: nothing of it is used, and nothing is left.
    assert adopt.adopt(config, planned, store, 4, "another word") is None
    light.await_true(lambda: not any(still_runs(one) for one in listed))
    light.await_true(lambda: placement.standing_groups(abandoned.RUN) == [])


def launch(work: Path, name: str, address: str) -> subprocess.Popen[bytes]:
    config = tiny.write_config(
        work / name, name, run={"name": name, "steps": STEPS, "seed": 7, "dir": str(work / name / "runs" / name)},
        evaluation={"every": 3, "score": "exact"}, placement={"device": "cpu"},
    )  # fmt: skip
    with (work / f"{name}.txt").open("ab") as output:
        return subprocess.Popen(
            tiny.command(config, "--address", address), cwd=work / name, stdout=output, stderr=output
        )


def await_step(work: Path, name: str, process: subprocess.Popen[bytes], step: int) -> dict[str, Any]:
    """The control API's view of a run once it has this many records."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, (work / f"{name}.txt").read_text()[-3000:]
        file = read_run_file(work / name / "runs" / name)
        if file is not None and file.pid == process.pid:
            headers = {TOKEN_HEADER: find_token(name) or ""}
            view: dict[str, Any] = httpx.get(f"http://{file.api_address}/v1/run", headers=headers).json()
            if view.get("log_head", 0) >= step:
                return view
        time.sleep(0.1)
    raise AssertionError(f"{name} never came to step {step}")


def members_of(work: Path, name: str) -> dict[str, int]:
    """Every generation that was ever listed, with the pid of its rank 0."""
    store = Store(str(work / name / "runs" / name))
    listed = [key for key in store.list("generations") if key.endswith(".pids")]
    return {key: json.loads(store.get(key))[0]["pid"] for key in listed}


def test_a_killed_controller_s_run_goes_on_with_the_same_members(cluster: Cluster, tmp_path: Path) -> None:
    ray.shutdown()
    first = launch(tmp_path, "killed", cluster.address)
    await_step(tmp_path, "killed", first, 2)
    before = members_of(tmp_path, "killed")
    first.kill()
    first.wait()

    began = time.monotonic()
    second = launch(tmp_path, "killed", cluster.address)
    view = await_step(tmp_path, "killed", second, 2)
    print(f"back after {time.monotonic() - began:.1f} s")
    assert view["attempt"] == 2
    assert {one["generation"] for one in view["groups"].values()} == {1}
    assert second.wait(timeout=START_SECONDS) == 0, (tmp_path / "killed.txt").read_text()[-3000:]
    assert members_of(tmp_path, "killed") == before

    golden = launch(tmp_path, "golden", cluster.address)
    assert golden.wait(timeout=START_SECONDS) == 0, (tmp_path / "golden.txt").read_text()[-3000:]
    assert bits.payload_hashes(tmp_path / "killed") == bits.payload_hashes(tmp_path / "golden")
    for group in ("policy", "critic"):
        hashes = bits.state_hashes(tmp_path / "golden", group, STEPS)
        assert hashes
        assert bits.state_hashes(tmp_path / "killed", group, STEPS) == hashes
    start.connect(light.config(placement={"device": "cpu"}), cluster.address)
    light.await_empty()
