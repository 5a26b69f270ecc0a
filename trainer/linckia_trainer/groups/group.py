"""``ActorGroup``: the members of one group as one thing to call."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from linckia.api.names import NAMESPACE, actor_name
from linckia.api.plan import GroupPlan, MemberPlan
from linckia_trainer.experience.batching import shard, unshard
from linckia_trainer.groups.member import Identity
from linckia_trainer.groups.placement import Placed

Arrays = dict[str, NDArray[Any]]


class ActorGroup:
    """One generation of a group: its Ray actors in rank order.

    ``duplicate_actors`` members in a row work on the same rows (one ring-attention or tensor-parallel set): they get
    the same slice and count once in the result.
    """

    def __init__(
        self, name: str, members: Sequence[Any], attempt: int, generation: int, duplicate_actors: int = 1
    ) -> None:
        assert len(members) % duplicate_actors == 0, f"{len(members)} members in sets of {duplicate_actors}"
        self.name = name
        self.members = list(members)
        self.attempt = attempt
        self.generation = generation
        self.duplicate_actors = duplicate_actors

    @property
    def num_shards(self) -> int:
        return len(self.members) // self.duplicate_actors

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``method`` on all members with the same arguments; their results in rank order."""
        results: list[Any] = ray.get(self.start(method, *args, **kwargs))
        return results

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``call`` without waiting: the object refs in rank order."""
        return [member.invoke.remote(self.attempt, self.generation, method, *args, **kwargs) for member in self.members]

    def call_sharded(self, method: str, batch: Arrays, *args: Any, pad_rows: bool = True, **kwargs: Any) -> "Sharded":
        """``method`` on each data-parallel member with its slice of ``batch``; returns at once.

        Slices are balanced by tokens and never empty; with ``pad_rows`` each has equally many rows, filled up with rows
        of no weight. Each slice is put once in the object store.
        """
        shards, rows = shard(batch, self.num_shards, pad_rows)
        refs = []
        for index, part in enumerate(shards):
            slice_ref = ray.put(part)
            first = index * self.duplicate_actors
            for member in self.members[first : first + self.duplicate_actors]:
                refs.append(member.invoke.remote(self.attempt, self.generation, method, slice_ref, *args, **kwargs))
        return Sharded(refs, rows, self.duplicate_actors)

    def status(self) -> list[dict[str, Any]]:
        """Every member's status, through the control group: answered while a call runs."""
        results: list[dict[str, Any]] = ray.get([member.status.remote(self.attempt) for member in self.members])
        return results

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member)


class Sharded:
    """A ``call_sharded`` on its way."""

    def __init__(self, refs: list[Any], rows: list[NDArray[np.int64]], duplicate_actors: int) -> None:
        self.refs = refs
        self.rows = rows
        self.duplicate_actors = duplicate_actors

    def results(self, timeout: float | None = None) -> list[Any]:
        """One result per slice, in order. TimeoutError (Ray's own) after ``timeout`` seconds."""
        results: list[Any] = ray.get(self.refs, timeout=timeout)
        return results[:: self.duplicate_actors]

    def rows_joined(self) -> dict[str, NDArray[Any]]:
        """Per-row results in the batch's row order, without the padding rows."""
        return unshard(self.results(), self.rows)


def start_group(
    member_class: Any,
    plan: GroupPlan,
    placed: Placed,
    run: str,
    attempt: int,
    generation: int,
    device: str,
    orphan_timeout: float,
) -> ActorGroup:
    """Create the members of a group in their bundles (no waiting). ``device``: "cuda" or "cpu" where GPUs are planned."""
    world = len(plan.members)
    remote = ray.remote(concurrency_groups={"control": 2})(member_class)
    members = []
    for member in plan.members:
        identity = Identity(run, plan.name, generation, member.rank, world, attempt)
        on_gpu = device == "cuda" and (member.gpus or member.worker_gpus) > 0
        members.append(
            remote.options(
                name=actor_name(run, plan.name, generation, member.rank),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=member.cpus,
                num_gpus=member.gpus,
                memory=member.memory_bytes or None,
                resources=dict(member.custom) or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placed[member.placement_group], member.bundle, placement_group_capture_child_tasks=True
                ),
                runtime_env={"env_vars": environment(member, on_gpu)},
            ).remote(identity, "cuda" if on_gpu else "cpu", member.threads, orphan_timeout)
        )
    return ActorGroup(plan.name, members, attempt, generation)


def environment(member: MemberPlan, on_gpu: bool) -> dict[str, str]:
    """Environment variables of a member's process: its thread count, and what its tensor-parallel workers need."""
    threads = str(member.threads)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if not on_gpu:
        # Members of one machine share its cores: a thread that waits must not spin on one that another could use.
        variables |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
    if member.worker_bundles:
        variables["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(bundle) for bundle in member.worker_bundles)
        variables["VLLM_RAY_PER_WORKER_GPUS"] = f"{member.worker_gpus:g}"
    for name in ("HF_HUB_OFFLINE", "HF_HOME"):
        if name in os.environ:
            variables[name] = os.environ[name]
    return variables
