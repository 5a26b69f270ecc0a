"""A plan as a person and a program read it."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from linckia.api.plan import GroupPlan, Plan
from linckia.api.resources import words


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
