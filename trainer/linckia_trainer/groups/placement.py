"""A plan becomes Ray placement groups: GPU ones first, with a time limit whose error says what is missing."""

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from linckia.api.errors import UserError
from linckia.api.names import placement_group_name
from linckia.api.plan import PlacementGroupPlan, Plan, check_fits, in_node_order
from linckia.api.resources import add_resources

# Resources that Ray adds to every node and for every bundle, and that nobody asks for.
BOOKKEEPING = re.compile(r"node:|accelerator_type:|object_store_memory$|.*_group_(\d+_)?[0-9a-f]{36}$")

Placed = dict[str, PlacementGroup]


def cluster_nodes() -> list[dict[str, float]]:
    """The resources of each node that is alive."""
    return [_asked_for(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def place(plan: Plan, run: str, timeout: float) -> tuple[Plan, Placed]:
    """Create and await every placement group; returns the plan in node order and the groups by key.

    GPU groups are created and ready before any CPU-only one is asked for. Raises UserError for a plan that can never
    fit, or that the cluster does not fit within ``timeout`` seconds; nothing is left behind then.
    """
    check_fits(plan, cluster_nodes())
    placed: Placed = {}
    deadline = time.monotonic() + timeout
    first = next_number(run)
    try:
        for uses_gpus in (True, False):
            waiting = [one for one in plan.placement_groups if one.uses_gpus is uses_gpus]
            for group in waiting:
                placed[group.key] = placement_group(
                    [dict(bundle) for bundle in group.bundles],
                    strategy=group.strategy,
                    name=placement_group_name(run, first + len(placed)),
                    lifetime="detached",
                )
            for group in waiting:
                left = max(0, math.ceil(deadline - time.monotonic()))  # Ray drops what is less than a second
                if not placed[group.key].wait(left):
                    raise _does_not_fit(plan, placed, timeout)
    except BaseException:
        release(placed)
        raise
    return in_node_order(plan, {key: bundle_nodes(group) for key, group in placed.items()}), placed


def place_more(planned: PlacementGroupPlan, run: str, timeout: float) -> PlacementGroup:
    """Create and await one more placement group of a run that stands; UserError after ``timeout`` seconds."""
    group = placement_group(
        [dict(bundle) for bundle in planned.bundles],
        strategy=planned.strategy,
        name=placement_group_name(run, next_number(run)),
        lifetime="detached",
    )
    if not group.wait(math.ceil(timeout)):
        remove_placement_group(group)
        raise UserError(
            "placement.timeout",
            timeout,
            f"the bundles of {planned.key}, {_bundles(planned)}, found no place in that time",
            "give the cluster more nodes, and ask again",
        )
    return group


def release(placed: Mapping[str, PlacementGroup]) -> None:
    for group in placed.values():
        remove_placement_group(group)


def next_number(run: str) -> int:
    """The first number n for which no ``{run}/pg/n`` stands."""
    prefix = placement_group_name(run, 0)[:-1]
    taken = [int(entry["name"][len(prefix) :]) for entry in _standing(prefix)]
    return max(taken, default=-1) + 1


def remove_standing(run: str) -> None:
    """Remove the placement groups that an earlier attempt of this run left."""
    for entry in standing_groups(run):
        remove(entry["name"])


def remove(name: str) -> None:
    with contextlib.suppress(ValueError):  # somebody else removed it meanwhile
        remove_placement_group(ray.util.get_placement_group(name))


def standing_groups(run: str) -> list[dict[str, Any]]:
    """Ray's entries of the run's placement groups, those that wait for a place among them."""
    return _standing(placement_group_name(run, 0)[:-1])


def _standing(prefix: str) -> list[dict[str, Any]]:
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [entry for entry in table.values() if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"]


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """For each bundle its node as "ip/node id", which sorts by node."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [f"{addresses[nodes[bundle]]}/{nodes[bundle]}" for bundle in sorted(nodes)]


def _does_not_fit(plan: Plan, placed: Placed, timeout: float) -> UserError:
    missing = [_bundles(group) for group in plan.placement_groups if not ready(placed.get(group.key))]
    total, free = _asked_for(ray.cluster_resources()), _asked_for(ray.available_resources())
    return UserError(
        "placement.timeout",
        timeout,
        f"after {timeout:g} s these bundles have no place: {'; '.join(missing)}. The cluster has {_shown(total)}, of which "
        f"{_shown(free)} are free; held by {_holders(total, free)}",
        "free or add resources, lower the groups' resources (linckia plan CONFIG shows them), or raise placement.timeout",
    )


def _holders(total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Who holds what is not free: placement groups by name, this run's among them, and all else together."""
    held: dict[str, dict[str, float]] = {}
    for entry_id, entry in placement_group_table().items():
        if entry["state"] == "CREATED":
            held[entry["name"] or entry_id[:8]] = add_resources(entry["bundles"].values())
    parts = [f"placement group {name} {_shown(amounts)}" for name, amounts in sorted(held.items())]
    in_groups = add_resources(held.values())
    others = {name: round(total[name] - free.get(name, 0.0) - in_groups.get(name, 0.0), 4) for name in total}
    others = {name: amount for name, amount in others.items() if amount > 0}
    if others:
        named = sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
        among = (
            f"; the cluster's named actors: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}" if named else ""
        )
        parts.append(f"tasks and actors outside placement groups {_shown(others)}{among}")
    return ", ".join(parts) or "nobody"


def ready(group: PlacementGroup | None) -> bool:
    return group is not None and placement_group_table(group)["state"] == "CREATED"


def _bundles(group: PlacementGroupPlan) -> str:
    counted = Counter(_shown(bundle) for bundle in group.bundles)
    return f"{group.key} ({group.strategy}): " + " + ".join(f"{count} x {bundle}" for bundle, count in counted.items())


def _asked_for(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not BOOKKEEPING.match(name)}


def _shown(resources: Mapping[str, float]) -> str:
    wanted = dict(sorted(resources.items()))
    if "memory" in wanted:
        wanted["memory"] = round(wanted["memory"] / 1e9, 1)
    return "{" + ", ".join(f"{key}{' GB' if key == 'memory' else ''}: {value:g}" for key, value in wanted.items()) + "}"
