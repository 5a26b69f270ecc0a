"""What the watcher saw at one moment. Frozen records; nothing here judges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from linckia.api.names import role_of

ActorState = Literal["DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD"]
Cause = Literal[
    "WORKER_DIED", "RAY_KILL", "OUT_OF_MEMORY", "NODE_DIED", "OWNER_DIED", "CREATION_FAILED", "RUNTIME_ENV_FAILED",
    "UNSCHEDULABLE", "OUT_OF_SCOPE", "UNKNOWN",
]  # fmt: skip

IDLE = "idle"  # the stage of a member that waits to be called


@dataclass(frozen=True)
class ActorSeen:
    """One actor as the state API lists it. ``cause`` and ``message`` are given for the dead.

    Example: ``ActorSeen("sort-seed1/policy/2/0", "DEAD", 4711, "a1b2", "WORKER_DIED", "The process was killed by ...")``
    """

    name: str
    state: ActorState
    pid: int | None
    node_id: str | None
    cause: Cause | None = None
    message: str = ""


@dataclass(frozen=True)
class NodeSeen:
    """One node of the cluster. Example: ``NodeSeen("a1b2", "10.0.0.7", alive=False, message="health check failed")``"""

    node_id: str
    ip: str
    alive: bool
    message: str = ""


@dataclass(frozen=True)
class PlacementGroupSeen:
    """Example: ``PlacementGroupSeen("sort-seed1/pg/0", "CREATED")``; other states: PENDING, REMOVED, RESCHEDULING."""

    name: str
    state: str


@dataclass(frozen=True)
class RayState:
    """What the state API said: each part None if it did not answer; ``problems`` says why, for a person.

    ``complete`` is False where the answer was cut: an actor that is not listed is then unknown.

    Example: ``RayState(actors=None, nodes=(), placement_groups=(), problems=("actors: no answer in 2 s",))``
    """

    actors: tuple[ActorSeen, ...] | None = None
    nodes: tuple[NodeSeen, ...] | None = None
    placement_groups: tuple[PlacementGroupSeen, ...] | None = None
    problems: tuple[str, ...] = ()
    complete: bool = True


@dataclass(frozen=True)
class MemberSeen:
    """One rank by its control call. When it did not answer, ``stage`` and ``progress`` are not known and not read.

    ``stage`` is ``idle`` while the member waits to be called; ``progress`` counts what it has done in its life, in the
    stage's own unit (micro-batches, engine steps, buckets).

    Example: ``MemberSeen(rank=1, answered=True, stage="update", progress=118, pid=4711, node_id="a1b2")``
    """

    rank: int
    answered: bool
    stage: str = IDLE
    progress: int = 0
    pid: int | None = None
    node_id: str | None = None


@dataclass(frozen=True)
class GroupSeen:
    """One generation of a group. ``members`` are in rank order, ``world_size`` of them in a whole group.

    Example: ``GroupSeen("rollout-3", "rollout", generation=2, world_size=1, members=(MemberSeen(0, answered=False),))``
    """

    name: str
    role: str
    generation: int
    world_size: int
    members: tuple[MemberSeen, ...]


@dataclass(frozen=True)
class Observation:
    """Everything that was seen at ``time`` (seconds of the watcher's clock, which never goes back).

    ``stage`` and ``step`` are where the run's main loop stands.

    Example: ``Observation(1200.5, run="sort-seed1", step=12, stage="update", groups=(...), ray=RayState(...))``
    """

    time: float
    run: str
    step: int
    stage: str
    groups: tuple[GroupSeen, ...]
    ray: RayState


def group_seen(name: str, generation: int, statuses: Sequence[Mapping[str, Any] | None]) -> GroupSeen:
    """A group by what its members' ``status`` calls returned, in rank order; None for a call that was not answered.

    A status of another generation is none of this group's: its member counts as not answered.
    """
    members = tuple(_member_seen(rank, status, generation) for rank, status in enumerate(statuses))
    return GroupSeen(name, role_of(name), generation, len(statuses), members)


def _member_seen(rank: int, status: Mapping[str, Any] | None, generation: int) -> MemberSeen:
    if status is None or status.get("generation", generation) != generation:
        return MemberSeen(rank, answered=False)
    return MemberSeen(
        rank, True, status.get("stage", IDLE), status.get("progress", 0), status.get("pid"), status.get("node_id")
    )
