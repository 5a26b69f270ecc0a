"""Adoption: what the last attempt left standing in the cluster, whole and loaded, works on for the next one.

A group is found by its members' names. From the first status call on its members refuse every lower attempt; what they are
doing for one is left to finish. An update is the same fold whoever asked for it, and ``recovery.restore`` reads back how
far it came. What an engine has not handed over is dropped and sampled again, so that no answer can end up in another step.
What is not whole is killed; its places are kept, and the group is started there as usual.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError
from linckia.api.plan import PlacementGroupPlan, Plan, in_node_order
from linckia_trainer.groups import leftovers, placement
from linckia_trainer.groups.group import ActorGroup, Call
from linckia_trainer.groups.placement import Placed
from linckia_trainer.log.store import Store

ANSWER_SECONDS = 10.0  # within which a member that is well answers its control call
LOOK_SECONDS = 0.2
STILL_SECONDS = 30.0  # a busy group that makes no progress for so long waits for somebody who is gone
STATE_KEYS = ("applied_step", "log_hash", "dirty")

Statuses = list[dict[str, Any]]


@dataclass
class Adopted:
    """Groups that go on, and the places of all; ``unplaced`` are the placement groups that do not stand."""

    groups: dict[str, ActorGroup]
    plan: Plan
    placed: Placed
    unplaced: dict[str, PlacementGroupPlan]


def adopt(config: RunConfig, planned: Plan, store: Store, attempt: int, word: str) -> Adopted | None:
    """Take over what stands of this run and kill the rest; None if nothing can be taken over, and nothing is left then.

    Raises FencedError when a newer attempt has taken over.
    """
    run = config.run.name
    # Where engines and trainer take turns on their devices, it cannot be seen whose turn it was.
    found = {} if config.placement.colocation == "all" and planned.gpus else standing(run, planned, attempt, word)
    found = settled(found)
    leftovers.remove(run, store, {(name, group.generation) for name, (group, _) in found.items()})
    if not found:
        return None
    keys = {group.name: group.members[0].placement_group for group in planned.groups}
    known = {keys[name]: statuses[0]["placement_group"] for name, (_, statuses) in found.items()}
    entries = placement.standing_groups(run)
    named = match_places(planned.placement_groups, entries, known)
    for entry in entries:
        if entry["name"] not in named.values():
            placement.remove(entry["name"])
    placed = {key: ray.util.get_placement_group(name) for key, name in named.items()}
    unplaced = {one.key: one for one in planned.placement_groups if one.key not in placed}
    return Adopted({name: group for name, (group, _) in found.items()}, ordered(planned, placed), placed, unplaced)


def standing(run: str, planned: Plan, attempt: int, word: str) -> dict[str, tuple[ActorGroup, Statuses]]:
    """The groups whose members all answer that they have loaded ``word``; of two generations the newer."""
    ranks = {group.name: len(group.members) for group in planned.groups}
    asked: list[tuple[ActorGroup, Call]] = []
    for (name, generation), names in sorted(leftovers.standing_members(run).items()):
        members = [leftovers.find(names[rank]) for rank in sorted(names)]
        if sorted(names) == list(range(ranks.get(name, 0))) and None not in members:
            group = ActorGroup(name, members, attempt, generation)
            asked.append((group, group.ask_status()))
    refs = [ref for _, call in asked for ref in call]
    done = set(ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS)[0]) if refs else set()
    found = {}
    for group, call in asked:
        statuses = answers(call) if done.issuperset(call) else None
        if statuses and all(status["loaded"] == word for status in statuses):
            found[group.name] = group, statuses
    return found


def answers(call: Call) -> Statuses | None:
    """What every member said; None if one of them failed."""
    try:
        found: Statuses = call.results()
    except FencedError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the group is not well enough to be taken over
        return None
    return found


def settled(found: Mapping[str, tuple[ActorGroup, Statuses]]) -> dict[str, tuple[ActorGroup, Statuses]]:
    """Those of the groups that finish what they are doing, with their statuses after that. All are waited for at once."""
    watches = {name: Watch(group.start("settle")) for name, (group, _) in found.items()}
    while waiting := [name for name, watch in watches.items() if watch.waits()]:
        calls = {name: found[name][0].ask_status() for name in waiting}
        refs = [ref for call in calls.values() for ref in call]
        ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS)
        for name, call in calls.items():
            watches[name].see([_progress(ref) for ref in call], time.monotonic())
        time.sleep(LOOK_SECONDS)
    well = {name: found[name][0] for name, watch in watches.items() if watch.well()}
    said = {name: answers(group.ask_status()) for name, group in well.items()}
    return {name: (group, statuses) for name, group in well.items() if (statuses := said[name]) and agree(statuses)}


class Watch:
    """Waits for one group's ``settle``, which its members come to when they have finished what they are doing."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.seen: list[Any] = []
        self.changed = time.monotonic()
        self.given_up = False

    def waits(self) -> bool:
        refs = list(self.call)
        return not self.given_up and len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) < len(refs)

    def see(self, seen: list[Any], now: float) -> None:
        if seen != self.seen:
            self.seen, self.changed = seen, now
        self.given_up = now - self.changed > STILL_SECONDS

    def well(self) -> bool:
        return not self.given_up and answers(self.call) is not None


def _progress(ref: Any) -> Any:
    """What a member's control call tells of its progress; None while it does not answer."""
    try:
        status = ray.get(ref, timeout=0)
    except FencedError:
        raise
    except Exception:  # noqa: BLE001 - it counts as no progress
        return None
    return status["stage"], status["progress"]


def agree(statuses: Statuses) -> bool:
    """Whether all ranks stand at the same point of the log and none is between two."""
    points = {tuple(status.get(key) for key in STATE_KEYS) for status in statuses}
    return len(points) == 1 and not statuses[0].get("dirty")


def match_places(
    wanted: Sequence[PlacementGroupPlan], entries: Collection[Mapping[str, Any]], known: Mapping[str, str]
) -> dict[str, str]:
    """For each planned placement group the name of the one that stands for it, as far as there are any.

    ``entries`` are Ray's, ``known`` says the id of those that members stand in. All others are told by their bundles:
    where two have the same, either will do.
    """
    by_id = {entry["placement_group_id"]: entry["name"] for entry in entries}
    named = {key: by_id[id_] for key, id_ in known.items() if id_ in by_id}
    free = [entry for entry in entries if entry["name"] not in named.values() and entry["state"] == "CREATED"]
    for group in wanted:
        if group.key in named:
            continue
        bundles = [dict(bundle) for bundle in group.bundles]
        fitting = [one for one in free if one["strategy"] == group.strategy and in_order(one["bundles"]) == bundles]
        if fitting:
            named[group.key] = fitting[0]["name"]
            free.remove(fitting[0])
    return named


def in_order(bundles: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    return [dict(bundles[index]) for index in sorted(bundles)]


def ordered(planned: Plan, placed: Mapping[str, PlacementGroup]) -> Plan:
    """The plan in node order, as ``placement.place`` made it of the same places; what is not all placed keeps its order."""
    nodes = {one.key: [""] * len(one.bundles) for one in planned.placement_groups}
    standing = {key: group for key, group in placed.items() if placement.ready(group)}
    return in_node_order(planned, nodes | {key: placement.bundle_nodes(group) for key, group in standing.items()})
