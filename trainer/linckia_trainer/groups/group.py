"""``ActorGroup``: the members of one group as one thing to call."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from linckia.api.names import NAMESPACE, actor_name
from linckia.api.plan import GroupPlan, MemberPlan
from linckia_trainer.experience.batching import shard, unshard
from linckia_trainer.groups.failure import DEATHS, GroupLostError, death_of, lost
from linckia_trainer.groups.member import Identity
from linckia_trainer.groups.placement import Placed

Arrays = dict[str, NDArray[Any]]
DEATH_SECONDS = 1.0  # within which a death is known that made the others of its world fail


class ActorGroup:
    """The Ray actors of a group's current generation, in rank order.

    ``duplicate_actors`` members in a row work on the same rows (one ring-attention or tensor-parallel set): they get
    the same slice and count once in the result.
    """

    def __init__(
        self, name: str, members: Sequence[Any], attempt: int, generation: int, duplicate_actors: int = 1
    ) -> None:
        assert len(members) % duplicate_actors == 0, f"{len(members)} members in sets of {duplicate_actors}"
        self.name = name
        self.attempt = attempt
        self.incarnation = (generation, list(members))  # one value, so that no thread sees half of a replacement
        self.duplicate_actors = duplicate_actors
        self.processes: list[dict[str, Any]] = []  # what a fence has to see gone
        self.devices: list[list[str]] = []  # of each rank, as Ray counts them on its node

    @property
    def generation(self) -> int:
        return self.incarnation[0]

    @property
    def members(self) -> list[Any]:
        return self.incarnation[1]

    def become(self, successor: "ActorGroup") -> None:
        """From now on this group is ``successor``, its next generation."""
        self.incarnation = successor.incarnation
        self.processes, self.devices = successor.processes, successor.devices

    @property
    def num_shards(self) -> int:
        return len(self.members) // self.duplicate_actors

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``method`` on all members with the same arguments; their results in rank order. GroupLostError if one is lost."""
        return self.start(method, *args, **kwargs).results()

    def start(self, method: str, *args: Any, **kwargs: Any) -> "Call":
        """``call`` without waiting."""
        generation, members = self.incarnation
        refs = [member.invoke.remote(self.attempt, generation, method, *args, **kwargs) for member in members]
        return Call(self.name, generation, refs)

    def first(self, method: str, *args: Any) -> Any:
        """``method`` on rank 0 alone; its result."""
        generation, members = self.incarnation
        return Call(
            self.name, generation, [members[0].invoke.remote(self.attempt, generation, method, *args)]
        ).results()[0]

    def call_sharded(self, method: str, batch: Arrays, *args: Any, pad_rows: bool = True, **kwargs: Any) -> "Sharded":
        """``method`` on each data-parallel member with its slice of ``batch``; returns at once.

        Slices are balanced by tokens and never empty; with ``pad_rows`` each has equally many rows, filled up with rows
        of no weight. Each slice is put once in the object store.
        """
        generation, members = self.incarnation
        shards, rows = shard(batch, self.num_shards, pad_rows)
        refs = []
        for index, part in enumerate(shards):
            slice_ref = ray.put(part)
            first = index * self.duplicate_actors
            for member in members[first : first + self.duplicate_actors]:
                refs.append(member.invoke.remote(self.attempt, generation, method, slice_ref, *args, **kwargs))
        return Sharded(self.name, generation, refs, rows, self.duplicate_actors)

    def tell(self, method: str, *args: Any) -> None:
        """A control method on all members, heard while a call runs; nobody waits for it."""
        for member in self.members:
            getattr(member, method).remote(self.attempt, *args)

    def ask_status(self) -> "Call":
        """Every member's status, through the control group: answered while a call runs."""
        generation, members = self.incarnation
        return Call(self.name, generation, [member.status.remote(self.attempt) for member in members])

    def status(self) -> list[dict[str, Any]]:
        """``ask_status``, waited for."""
        return self.ask_status().results()

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member)


class Call:
    """A call to every member, on its way; iterates over its object refs in rank order."""

    def __init__(self, group: str, generation: int, refs: list[Any]) -> None:
        self.group = group
        self.generation = generation
        self.refs = refs

    def __iter__(self) -> Iterator[Any]:
        return iter(self.refs)

    def results(self, timeout: float | None = None) -> list[Any]:
        """One result per member, as soon as all are there or one has failed.

        Raises GroupLostError if a member died, or raised what a restart may mend; TimeoutError (Ray's own) after ``timeout``
        seconds; else what the member raised.
        """
        try:
            results: list[Any] = ray.get(self.refs, timeout=timeout)
        except Exception as error:
            found = self._loss(error)
            if found is None:
                raise
            raise found from error
        return results

    def _loss(self, error: Exception) -> GroupLostError | None:
        """A member that died is the cause of what the others of its world then raise: look for the death first."""
        found = lost(self.group, self.generation, error)
        if found is None or isinstance(error, DEATHS):
            return found
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=DEATH_SECONDS, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except Exception as other:  # noqa: BLE001 - only a death matters here
                if (death := death_of(self.group, self.generation, other)) is not None:
                    return death
        return found


class Sharded(Call):
    """A ``call_sharded`` on its way."""

    def __init__(
        self, group: str, generation: int, refs: list[Any], rows: list[NDArray[np.int64]], duplicate_actors: int
    ) -> None:
        super().__init__(group, generation, refs)
        self.rows = rows
        self.duplicate_actors = duplicate_actors

    def results(self, timeout: float | None = None) -> list[Any]:
        """One result per slice, in order."""
        return super().results(timeout)[:: self.duplicate_actors]

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
    standby: bool = False,
) -> ActorGroup:
    """Create the members of a group in their bundles (no waiting). ``device``: "cuda" or "cpu" where GPUs are planned.

    A ``standby`` is in its bundle and takes nothing of it.
    """
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
                num_cpus=0 if standby else member.cpus,
                num_gpus=0 if standby else member.gpus,
                memory=None if standby else member.memory_bytes or None,
                resources=None if standby else dict(member.custom) or None,
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
