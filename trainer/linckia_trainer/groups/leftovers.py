"""What earlier attempts of a run left in the cluster, found by its names: members, their processes, placement groups."""

import contextlib
import json
import re
from collections.abc import Collection
from typing import Any

import ray

from linckia.api.errors import UserError
from linckia.api.names import NAMESPACE, parse_actor_name
from linckia_trainer.groups import placement
from linckia_trainer.groups.fence import Process, fence
from linckia_trainer.log.store import Store

_LISTED = re.compile(r"generations/(.+)/(\d+)\.pids")

Incarnation = tuple[str, int]  # (group, generation)


def standing_members(run: str) -> dict[Incarnation, dict[int, str]]:
    """The actors that stand in the cluster, or are to: for each generation of a group its ranks' names."""
    found: dict[Incarnation, dict[int, str]] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        parsed = parse_actor_name(entry["name"]) if entry["namespace"] == NAMESPACE else None
        if parsed is not None and parsed[0] == run:
            _, group, generation, rank = parsed
            found.setdefault((group, generation), {})[rank] = entry["name"]
    return found


def listed_processes(store: Store, spared: Collection[Incarnation] = ()) -> list[Process]:
    """Every process that a generation of this run ever listed; most are gone, and their pids may be others' by now."""
    found: list[Process] = []
    for key in store.list("generations"):
        listed = _LISTED.fullmatch(key)
        if listed is None or (listed[1], int(listed[2])) in spared:
            continue
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged list lists nothing
            found += json.loads(store.get(key))
    return found


def remove(run: str, store: Store, spared: Collection[Incarnation] = ()) -> None:
    """Kill all members of a run and every process that they listed, but for the ``spared`` generations.

    If none is spared the placement groups are removed as well.
    """
    members = []
    for incarnation, ranks in standing_members(run).items():
        if incarnation not in spared:
            members += [actor for name in ranks.values() if (actor := find(name)) is not None]
    try:
        listed = listed_processes(store, spared)
    except (OSError, UserError):
        listed = []  # the run directory does not answer: what the cluster itself can say is still removed
    fence(members, listed)
    if not spared:
        placement.remove_standing(run)


def find(name: str) -> Any | None:
    """The actor of this name; None if it has gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
