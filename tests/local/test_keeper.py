"""The keeper on a real cluster: nothing stays of a run that nobody continues; a run that somebody continues is left alone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from local import abandoned, light
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray.cluster_utils import Cluster

from linckia.api.errors import FencedError
from linckia.api.names import NAMESPACE, keeper_name
from linckia.observe.ray_state import RayStateClient
from linckia_trainer import start
from linckia_trainer.groups import keeper, leftovers
from linckia_trainer.groups.fence import still_runs
from linckia_trainer.log.store import Store

# Nodes that were taken away leave sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ORPHAN_TIMEOUT = 3.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that takes no members, and a node."""
    with light.cluster(abandoned.HEAD, {"num_cpus": 16}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Iterator[RayStateClient]:
    """Connected as ``--address`` does it; the state API."""
    start.connect(abandoned.config_of(str(tmp_path), ORPHAN_TIMEOUT), cluster.address)
    with RayStateClient(f"http://{start.state_api_address()}", get_auth_headers_if_auth_enabled({}), timeout=10) as one:
        yield one
    ray.shutdown()


def states(client: RayStateClient) -> tuple[dict[str, str], dict[str, str]]:
    """State by name: actors, placement groups."""
    seen = client.look(abandoned.RUN, placement_groups=True)
    assert seen.problems == ()
    assert seen.actors is not None
    assert seen.placement_groups is not None
    return {one.name: one.state for one in seen.actors}, {one.name: one.state for one in seen.placement_groups}


def keeper_now() -> Any:
    return leftovers.find(keeper_name(abandoned.RUN))


def test_nothing_of_an_abandoned_run_remains(cluster: Cluster, client: RayStateClient, tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, abandoned.__file__, cluster.address, str(tmp_path), str(ORPHAN_TIMEOUT)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        processes = leftovers.listed_processes(Store(str(tmp_path)))
        children = [one for one in processes if psutil.Process(one["pid"]).name() == "sleep"]
        assert len(children) == len(processes) / 2 >= 6, "every member has a child"

        time.sleep(2 * ORPHAN_TIMEOUT)  # the witness: a run that is continued stays
        actors, placement_groups = states(client)
        assert all(still_runs(one) for one in processes)
        assert set(actors.values()) == {"ALIVE", "PENDING_CREATION"}
        assert set(placement_groups.values()) == {"CREATED", "PENDING"}

        controller.kill()
        died = time.monotonic()
        light.await_true(lambda: set(states(client)[0].values()) == {"DEAD"})
        light.await_true(lambda: set(states(client)[1].values()) <= {"REMOVED"})
        light.await_true(lambda: not any(still_runs(one) for one in processes))
        assert time.monotonic() - died >= ORPHAN_TIMEOUT / 2
        assert keeper_now() is None
        light.await_empty()
    finally:
        controller.kill()
        controller.wait()
        assert controller.stdout is not None
        controller.stdout.close()


def test_a_clean_end_leaves_no_keeper(client: RayStateClient, tmp_path: Path) -> None:
    config = abandoned.config_of(str(tmp_path), 900)
    with keeper.kept(config, 1):
        group = ray.util.placement_group([{"CPU": 1}], name=f"{abandoned.RUN}/pg/0", lifetime="detached")
        assert group.wait(20)
        assert keeper_now() is not None
    light.await_true(lambda: keeper_now() is None)
    light.await_empty()


def test_the_newest_attempt_keeps_the_run(client: RayStateClient, tmp_path: Path) -> None:
    config = abandoned.config_of(str(tmp_path), 900)
    first = keeper.hire(config, 1)
    second = keeper.hire(config, 2)
    assert first == second
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        keeper.hire(config, 1)
    for call in (first.renew, first.release):
        with pytest.raises(FencedError):
            ray.get(call.remote(1))
    ray.kill(ray.get_actor(keeper_name(abandoned.RUN), namespace=NAMESPACE))
    light.await_empty()


def test_a_keeper_that_is_lost_is_replaced(client: RayStateClient, tmp_path: Path) -> None:
    config = abandoned.config_of(str(tmp_path), ORPHAN_TIMEOUT)
    with keeper.kept(config, 1):
        lost = keeper_now()
        ray.kill(lost)
        light.await_true(lambda: keeper_now() is not None and keeper_now() != lost)
    light.await_empty()
