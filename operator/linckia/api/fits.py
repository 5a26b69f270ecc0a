"""Whether a plan can ever fit a cluster, and the plan as a person and a program read it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from linckia.api.errors import UserError
from linckia.api.plan import GroupPlan, PlacementGroupPlan, Plan, add_resources

Node = Mapping[str, float]
_SCALE = {"memory": (1e9, " GB")}


def check_fits(plan: Plan, nodes: Sequence[Node]) -> None:
    """Raise UserError if the plan can never be placed on nodes of these total Ray resources, even when they are idle.

    Sound, not complete: what is refused cannot be placed in any way; what passes may still not pack, and then the
    time limit on placement tells.
    """
    _check_totals(plan, nodes)
    for group in plan.placement_groups:
        for bundle in group.bundles:
            if not any(_times(bundle, node) for node in nodes):
                reason = f"no node is large enough for one bundle of {words(bundle)}; {describe(nodes)}"
                raise _misfit(group, reason, f"lower {_keys(group, 'resources')}, or add larger nodes")
        _check_strict(group, nodes)
    _check_counts(plan, nodes)


def _check_totals(plan: Plan, nodes: Sequence[Node]) -> None:
    have = add_resources(nodes)
    for name, amount in plan.totals.items():
        if amount > have.get(name, 0.0) + 1e-6:
            parts = {
                group.key: add_resources(group.bundles).get(name, 0.0)
                for group in plan.placement_groups
                if any(name in bundle for bundle in group.bundles)
            }
            needed = ", ".join(f"{key} {_amount(name, part)}" for key, part in parts.items())
            raise UserError(
                "placement",
                None,
                f"the run needs {_amount(name, amount)} {name} ({needed}) and the cluster has "
                f"{_amount(name, have.get(name, 0.0))}; {describe(nodes)}",
                "use fewer or smaller members, share devices with placement.colocation, or add nodes",
            )


def _check_strict(group: PlacementGroupPlan, nodes: Sequence[Node]) -> None:
    count = len(group.bundles)
    if group.strategy == "STRICT_PACK":
        whole = add_resources(group.bundles)
        if not any(_times(whole, node) for node in nodes):
            reason = f"STRICT_PACK wants {count} bundles, {words(whole)} together, on one node; {describe(nodes)}"
            raise _misfit(group, reason, f"set {_keys(group, 'resources.strategy')} to PACK, or use smaller groups")
    if group.strategy == "STRICT_SPREAD":
        able = sum(any(_times(bundle, node) for bundle in group.bundles) for node in nodes)
        if able < count:
            reason = f"STRICT_SPREAD wants {count} bundles on {count} nodes and {able} can hold one; {describe(nodes)}"
            raise _misfit(group, reason, f"set {_keys(group, 'resources.strategy')} to SPREAD, or use fewer members")


def _check_counts(plan: Plan, nodes: Sequence[Node]) -> None:
    """Bundles against nodes: eight of 1 GPU and 4 CPUs do not fit two nodes of 4 GPUs and 8 CPUs."""
    bundles = [
        bundle for group in plan.placement_groups if group.uses_gpus for bundle in group.bundles if "GPU" in bundle
    ]
    shared = set(bundles[0]).intersection(*bundles) if bundles else set()
    least = {name: min(bundle[name] for bundle in bundles) for name in shared}
    kinds = [(least, len(bundles))] if bundles else []
    counted = Counter(tuple(sorted(bundle.items())) for group in plan.placement_groups for bundle in group.bundles)
    kinds += [(dict(kind), count) for kind, count in counted.items()]
    for kind, count in kinds:
        room = sum(_times(kind, node) for node in nodes)
        if room < count:
            raise UserError(
                "placement",
                None,
                f"the run has {count} bundles of at least {words(kind)} and the cluster holds {room}, "
                f"{count - room} are missing; {describe(nodes)}",
                "lower resources.cpus or resources.memory of the roles, or add nodes",
            )


def _times(bundle: Node, node: Node) -> int:
    """How often a bundle fits an idle node."""
    return min((int(node.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items()), default=0)


def _misfit(group: PlacementGroupPlan, reason: str, next_step: str) -> UserError:
    return UserError(f"placement of {group.key}", None, reason, next_step)


def _keys(group: PlacementGroupPlan, key: str) -> str:
    return ", ".join(f"{role}.{key}" for role in group.roles)


# ---- in words ----------------------------------------------------------------------------------------------------


def _amount(name: str, amount: float) -> str:
    scale, unit = _SCALE.get(name, (1.0, ""))
    return f"{amount / scale:.4g}{unit}"


def words(bundle: Node) -> str:
    """A bundle in words, such as ``1 GPU, 4 CPU, 16 GB memory``."""
    names = sorted(bundle, key=lambda name: (name not in ("GPU", "CPU"), name != "GPU", name))
    return ", ".join(f"{_amount(name, bundle[name])} {name}" for name in names) or "nothing"


def describe(nodes: Sequence[Node]) -> str:
    """The cluster in words: like nodes counted, Ray's own bookkeeping resources left out."""
    if not nodes:
        return "the cluster has no node"
    kinds = Counter(
        words({k: v for k, v in node.items() if ":" not in k and k != "object_store_memory" and v}) for node in nodes
    )
    return "the cluster has " + "; ".join(f"{count} node{'s' * (count > 1)} of {kind}" for kind, count in kinds.items())


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with totals."""
    return {**asdict(plan), "totals": plan.totals}


def render_plan(plan: Plan) -> RenderableType:
    """The plan as two tables: who runs where, and what Ray is asked for."""
    groups = Table(
        title=f"Groups (colocation {plan.colocation}, on {'GPUs' if plan.gpus else 'CPUs'})", title_justify="left"
    )
    for column in ("group", "members", "each takes", "placement group", "bundles"):
        groups.add_column(column)
    for group in plan.groups:
        groups.add_row(
            group.name, str(len(group.members)), _takes(group), group.members[0].placement_group, _span(group)
        )
    asked = Table(title="Placement groups, in the order they are created", title_justify="left")
    for column in ("placement group", "strategy", "bundles", "of"):
        asked.add_column(column)
    for placement in plan.placement_groups:
        kinds = Counter(words(bundle) for bundle in placement.bundles)
        counts, kind_words = (str(count) for count in kinds.values()), kinds.keys()
        asked.add_row(placement.key, placement.strategy, "\n".join(counts), "\n".join(kind_words))
    return Group(groups, asked, f"In all: {words(plan.totals)}")


def _takes(group: GroupPlan) -> str:
    member = group.members[0]
    gpus, devices = (member.worker_gpus, len(member.bundles)) if member.worker_bundles else (member.gpus, 1)
    amounts = {"GPU": gpus, "CPU": member.cpus, "memory": float(member.memory_bytes), **member.custom}
    each = words({name: amount for name, amount in amounts.items() if amount})
    return f"{devices} x ({each})" if devices > 1 else each


def _span(group: GroupPlan) -> str:
    bundles = [bundle for member in group.members for bundle in member.bundles]
    return str(bundles[0]) if len(bundles) == 1 else f"{bundles[0]}-{bundles[-1]}"
