"""``decide``: what to do about an observation, from a table of rules. Pure and total: any observation has an answer.

Unknown is not dead: a rule looks only at what did answer. What the state API alone can see is left alone while it is
silent, and so is everybody while nobody answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from linckia.api.names import parse_actor_name
from linckia.decide.blame import Suspect, to_blame
from linckia.decide.history import STARTING, Decided, History, Track
from linckia.decide.limits import WatchPolicy, silence_limit, stage_limit
from linckia.observe.observation import IDLE, GroupSeen, MemberSeen, Observation

HUNG = "hung"
SLOW = "slow"


@dataclass(frozen=True)
class Decision:
    """One thing to do about one generation of a group. ``reason`` is for a person and holds the numbers.

    ``signal`` is how it failed, for a fingerprint: a cause of death such as ``WORKER_DIED``, or ``hung``, ``slow``.
    ``stage`` is the member's own, ``unknown`` where it was never heard.

    Example: ``Decision("restart", "policy", 2, "hang", "hung", "update", "rank 1 of policy has stood at 118 for ...")``
    """

    action: Literal["restart", "report"]
    group: str
    generation: int
    kind: Literal["death", "hang", "slow"]
    signal: str
    stage: str
    reason: str


Rule = Callable[[Observation, WatchPolicy, History, float], Iterator[Decision]]


def decide(observation: Observation, policy: WatchPolicy, history: History, now: float) -> list[Decision]:
    """What follows from an observation, at most one decision per group; the first rule that speaks of a group wins.

    ``history`` has learned the observation already. What it remembers as decided is not decided again for the same
    generation. An observation older than ``recovery.hang_floor_seconds`` at ``now`` says nothing any more.
    """
    if now - observation.time > policy.floor:
        return []
    found: dict[str, Decision] = {}
    for rule in RULES:
        for decision in rule(observation, policy, history, now):
            if not _decided(history, decision):
                found.setdefault(decision.group, decision)
    return list(found.values())


def remember(history: History, decision: Decision, now: float) -> History:
    """The history once a decision was carried out: it is not made again."""
    earlier = history.decided.get(decision.group)
    same = earlier is not None and earlier.generation == decision.generation
    actions = (earlier.actions if earlier is not None and same else frozenset()) | {decision.action}
    decided = {**history.decided, decision.group: Decided(decision.generation, actions)}
    last = now if decision.action == "restart" else history.last_restart
    return replace(history, decided=decided, last_restart=last)


def _decided(history: History, decision: Decision) -> bool:
    """A group whose restart was decided has nothing more to be decided; a report is made once."""
    earlier = history.decided.get(decision.group)
    if earlier is None or earlier.generation != decision.generation:
        return False
    return "restart" in earlier.actions or decision.action in earlier.actions


def dead_actors(observation: Observation, policy: WatchPolicy, history: History, now: float) -> Iterator[Decision]:
    """The state API shows a member of the present generation dead. Actors that it does not list are unknown."""
    groups = {group.name: group for group in observation.groups}
    for actor in observation.ray.actors or ():
        member = parse_actor_name(actor.name) if actor.state == "DEAD" else None
        if member is None:
            continue
        run, name, generation, rank = member
        group = groups.get(name)
        if run != observation.run or group is None or group.generation != generation:
            continue
        cause = actor.cause or "UNKNOWN"
        process = f" (pid {actor.pid})" if actor.pid else ""
        words = f": {actor.message.splitlines()[0]}" if actor.message else ""
        yield Decision(
            "restart", name, generation, "death", cause, _stage(history, name, rank),
            f"rank {rank} of {name}{process} is dead, {cause}{words}",
        )  # fmt: skip


def dead_nodes(observation: Observation, policy: WatchPolicy, history: History, now: float) -> Iterator[Decision]:
    """The state API shows the node of a member dead."""
    dead = {node.node_id: node for node in observation.ray.nodes or () if not node.alive}
    for group in observation.groups:
        for member in group.members:
            track = history.tracks.get((group.name, member.rank))
            node = dead.get((track.node_id if track else None) or member.node_id or "")
            if node is not None:
                words = f": {node.message}" if node.message else ""
                yield Decision(
                    "restart", group.name, group.generation, "death", "NODE_DIED",
                    _stage(history, group.name, member.rank),
                    f"the node of rank {member.rank} of {group.name} is dead, {node.ip} ({node.node_id}){words}",
                )  # fmt: skip


def hung(observation: Observation, policy: WatchPolicy, history: History, now: float) -> Iterator[Decision]:
    """A member has shown no progress for longer than its stage may take, or has not answered for as long."""
    anybody = any(member.answered for group in observation.groups for member in group.members)
    suspects = []
    for group in observation.groups:
        for member in group.members:
            track = history.tracks.get((group.name, member.rank))
            suspect = _suspect(group, member, track, observation, policy, history) if track is not None else None
            # While nobody answers, it is the watcher that cannot see; only what lasts very long is held against them.
            if suspect is not None and (anybody or suspect.quiet > policy.first_time):
                suspects.append(suspect)
    for blamed in to_blame(suspects, observation.groups, history, policy):
        yield Decision(
            "restart", blamed.group.name, blamed.group.generation, "hang", HUNG, blamed.stage, _hang_reason(blamed)
        )


def slow(observation: Observation, policy: WatchPolicy, history: History, now: float) -> Iterator[Decision]:
    """A member is slower than its peers, step after step."""
    factor = policy.recovery.straggler_factor
    generations = {group.name: group.generation for group in observation.groups}
    for ((name, rank), stage), slowness in history.paces.slowness.items():
        if name in generations and slowness.exceeds(factor):
            yield Decision(
                "restart" if policy.recovery.replace_stragglers else "report", name, generations[name], "slow", SLOW,
                stage,
                f"rank {rank} of {name} has been {slowness.factor:.1f} times slower than its peers in {stage} over "
                f"{slowness.count} steps (recovery.straggler_factor = {factor:g})",
            )  # fmt: skip


RULES: tuple[Rule, ...] = (dead_actors, dead_nodes, hung, slow)


def _suspect(
    group: GroupSeen,
    member: MemberSeen,
    track: Track,
    observation: Observation,
    policy: WatchPolicy,
    history: History,
) -> Suspect | None:
    """The member with what speaks against it; None for one that waits to be called, or may take longer yet."""
    time = observation.time
    silent = 0.0 if member.answered else time - track.answered
    if track.stage == IDLE:
        if member.answered:
            return None
        limit = silence_limit(group.role, history, policy)
        return Suspect(group, member.rank, IDLE, 0, silent, silent, limit) if silent > limit.seconds else None
    if track.stage == STARTING and not _shown_alive(group, member, observation):
        return None  # it may wait for resources; how long it may do so is the controller's to say
    quiet = time - track.since
    limit = stage_limit(group.role, track, history, policy)
    if quiet <= limit.seconds or 0.0 < silent <= policy.floor:
        return None
    return Suspect(group, member.rank, track.stage, track.progress, quiet, silent, limit)


def _shown_alive(group: GroupSeen, member: MemberSeen, observation: Observation) -> bool:
    wanted = (observation.run, group.name, group.generation, member.rank)
    return any(
        parse_actor_name(actor.name) == wanted and actor.state == "ALIVE" for actor in observation.ray.actors or ()
    )


def _hang_reason(suspect: Suspect) -> str:
    who = f"rank {suspect.rank} of {suspect.group.name}"
    limit = f"the limit is {suspect.limit.seconds:.0f} s: {suspect.limit.why}"
    if suspect.stage == STARTING:
        return f"{who} has not answered since it was started {suspect.quiet:.0f} s ago; {limit}"
    if suspect.stage == IDLE:
        return f"{who} has not answered its control call for {suspect.silent:.0f} s; {limit}"
    answers = (
        f"it has not answered its control call for {suspect.silent:.0f} s"
        if suspect.silent
        else "it answers its control call"
    )
    because = f" ({suspect.why_blamed})" if suspect.why_blamed else ""
    return (
        f"{who} has stood at {suspect.progress} in {suspect.stage} for {suspect.quiet:.0f} s and {answers}{because}; "
        f"{limit}"
    )


def _stage(history: History, group: str, rank: int) -> str:
    track = history.tracks.get((group, rank))
    return "unknown" if track is None else track.stage
