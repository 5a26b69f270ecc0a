"""Members without a model: what placement is tested with, on Ray's logical devices."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from linckia.api.config import RunConfig
from linckia.api.plan import GroupPlan, MemberPlan, Plan
from linckia_trainer.groups.group import ActorGroup, start_group
from linckia_trainer.groups.member import Member
from linckia_trainer.groups.placement import Placed

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not see the tests' folder


def config(**sections: Any) -> RunConfig:
    """A config whose model and data are only names; ``reward`` is a model, so that it may have a GPU."""
    sections = {"data": {"prompts_per_step": 128}, "reward": {}, **sections}
    sections["data"]["train"] = {"file": "/prompts.jsonl"}
    if "function" not in sections["reward"]:
        sections["reward"] = {"model": "/reward", **sections["reward"]}
    sections.setdefault("run", {"name": "placed"})
    return RunConfig.model_validate({"model": {"path": "/model"}, **sections})


def members(nodes: int, per_node: int, **keys: Any) -> dict[str, Any]:
    return {"num_nodes": nodes, "num_gpus_per_node": per_node, "micro_batch_size": 1, **keys}


class LightMember(Member):
    """Says where it is and what Ray gave it."""

    def where(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "rank": self.identity.rank,
            "node": context.get_node_id(),
            "gpus": context.get_accelerator_ids()["GPU"],
            "resources": {name: amount for name, amount in context.get_assigned_resources().items() if amount},
            "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_RAY")},
        }

    def double(self, arrays: dict[str, NDArray[Any]], by: int) -> dict[str, NDArray[Any]]:
        return {"doubled": by * arrays["lengths"], "rank": np.full(len(arrays["lengths"]), self.identity.rank)}

    def work(self, seconds: float, hangs: bool = False) -> None:
        """Ticks while it works; one that hangs goes on answering its control call."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if not hangs:
                self.progress.tick("update")
            time.sleep(0.05)

    def wait_for_attempt(self, attempt: int) -> int:
        """Works until the control surface has heard of ``attempt``."""
        while self.attempt < attempt:
            time.sleep(0.02)
        return self.attempt


def start(plan: Plan, placed: Placed, run: str = "placed", attempt: int = 1) -> dict[str, ActorGroup]:
    """Every group of the plan, as light members."""
    return {one.name: start_one(one, placed, run, attempt) for one in plan.groups}


def start_one(plan: GroupPlan, placed: Placed, run: str, attempt: int = 1, orphan_timeout: float = 900) -> ActorGroup:
    return start_group(LightMember, plan, placed, run, attempt, 1, "cpu", orphan_timeout)


def where(groups: Iterable[ActorGroup]) -> dict[str, list[dict[str, Any]]]:
    calls = {group.name: group.start("where") for group in groups}
    return {name: call.results() for name, call in calls.items()}


@ray.remote(num_cpus=0)
def _device() -> tuple[str, list[str]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"]


def worker_devices(member: MemberPlan, placed: Placed) -> list[tuple[str, list[str]]]:
    """(node, devices) of each tensor-parallel worker of an engine, placed as vLLM places its own: one a bundle."""
    return ray.get(
        [
            _device.options(  # type: ignore[attr-defined]
                num_gpus=member.worker_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placed[member.placement_group], bundle),
            ).remote()
            for bundle in member.worker_bundles
        ]
    )


@ray.remote
class Holder:
    """Somebody else's actor."""

    def ping(self) -> None:
        return None


def await_true(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def await_empty() -> None:
    """Wait until no actor and no placement group stands and every resource is free again."""

    def empty() -> bool:
        standing = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
        free = ray.available_resources()
        busy = [name for name in ("CPU", "GPU", "fast_disk") if free.get(name) != ray.cluster_resources().get(name)]
        return not standing and not busy and not ray.util.list_named_actors(all_namespaces=True)

    await_true(empty)


def shut_down() -> None:
    """Stop the Ray that this process started, and wait for its processes."""
    node = ray._private.worker._global_node
    ray.shutdown()
    await_processes([node])


@contextlib.contextmanager
def cluster(head: dict[str, Any], *nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A Ray cluster on this machine: a head with these arguments, and nodes with theirs."""
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for node in nodes:
        cluster.add_node(**node, wait=False)
    cluster.wait_for_nodes()
    yield cluster
    standing = cluster.list_all_nodes()
    ray.shutdown()
    cluster.shutdown()
    await_processes(standing)


def await_processes(nodes: Iterable[Any]) -> None:
    """Wait for the processes of Ray nodes that were stopped: it leaves their handles to the garbage collector."""
    for node in nodes:
        for info in chain(*node.all_processes.values()):
            info.process.wait(timeout=20)
