"""Where the actors of a run go: a pure function from the config to placement groups, bundles and fractions.

A *slot* is a bundle's index in its placement group. Ray does not say which node a bundle lands on, so after placement
`in_node_order` deals the slots of each role out again by node: ranks come out in node order, and the devices of one
engine side by side. A slot is only ever dealt out within one role, so each bundle keeps room for exactly who is in it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linckia.api.config import ROLES, Inference, Resources, RunConfig, Strategy, Trained, parse_memory
from linckia.api.errors import UserError
from linckia.api.names import rollout_group
from linckia.api.resources import add_resources, describe, in_units, words

_PRECISION = 10_000  # Ray counts resources in steps of 0.0001


@dataclass(frozen=True)
class MemberPlan:
    """One Ray actor.

    ``gpus`` is what the actor itself takes; an engine over several devices takes none: its workers, one in each of
    ``worker_bundles``, take ``worker_gpus`` each.
    """

    rank: int
    placement_group: str
    bundle: int
    cpus: float
    gpus: float
    memory_bytes: int
    custom: Mapping[str, float]
    threads: int
    worker_bundles: tuple[int, ...] = ()
    worker_gpus: float = 0.0

    @property
    def bundles(self) -> tuple[int, ...]:
        """Every slot the member is in."""
        return self.worker_bundles or (self.bundle,)


@dataclass(frozen=True)
class GroupPlan:
    """The actors that live and die together. ``members_per_node`` is what the config expects on each node."""

    name: str
    role: str
    members: tuple[MemberPlan, ...]
    members_per_node: int


@dataclass(frozen=True)
class PlacementGroupPlan:
    """One Ray placement group. ``roles`` says whose config keys shape it.

    Example: ``PlacementGroupPlan("rollout-0", ({"CPU": 1.0, "GPU": 1.0},) * 2, "STRICT_PACK", True, ("rollout",))``
    """

    key: str
    bundles: tuple[dict[str, float], ...]
    strategy: Strategy
    uses_gpus: bool
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Groups, and placement groups in the order in which they have to be created.

    Those with GPUs come first, and the ones without are created only when all of those are ready: a CPU-only group
    never takes the CPUs that a GPU group needs beside its device.
    """

    colocation: str
    gpus: bool
    groups: tuple[GroupPlan, ...]
    placement_groups: tuple[PlacementGroupPlan, ...]

    @property
    def totals(self) -> dict[str, float]:
        """Everything the run takes, by Ray resource."""
        return add_resources(bundle for group in self.placement_groups for bundle in group.bundles)

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)


@dataclass(frozen=True)
class _Unit:
    """One role before placement: ``count`` members (or engines) of ``width`` device slots each."""

    role: str
    resources: Resources
    count: int
    width: int = 1
    per_node: int = 1
    on_gpu: bool = True

    @property
    def slots(self) -> int:
        return self.count * self.width

    @property
    def shape(self) -> str:
        return f"{self.count // self.per_node} x {self.per_node}"


def plan(config: RunConfig, gpus: bool) -> Plan:
    """Place a run. ``gpus`` says whether it runs on GPUs (``placement.device``, resolved). Raises UserError."""
    groups: list[GroupPlan] = []
    placement_groups: list[PlacementGroupPlan] = []
    for key, units in _shares(config):
        fractions = _gpu_fractions(units, gpus)
        bundles = _bundles(units, fractions)
        if units[0].role == "rollout" and len(units) == 1:  # engines on their own: a placement group each
            for engine in range(units[0].count):
                groups.append(_engine(units[0], fractions, engine, rollout_group(engine), 0))
                width = units[0].width
                placement_groups.append(_placement_group(config, rollout_group(engine), units, bundles[:width]))
            continue
        placement_groups.append(_placement_group(config, key, units, bundles))
        for unit in units:
            if unit.role == "rollout":
                groups.extend(_engine(unit, fractions, n, key, n * unit.width) for n in range(unit.count))
            else:
                groups.append(_members(unit, fractions, key))
    order = [*ROLES[:-1], *(rollout_group(engine) for engine in range(config.rollout.engines))]
    groups.sort(key=lambda group: order.index(group.name))
    # Among those with GPUs the hard to place come first: one node for all bundles, then the many.
    placement_groups.sort(key=lambda group: (not group.uses_gpus, group.strategy != "STRICT_PACK", -len(group.bundles)))
    return Plan(config.placement.colocation, gpus, tuple(groups), tuple(placement_groups))


def plan_group(config: RunConfig, role: str, group: Trained | Inference, gpus: bool) -> Plan:
    """The plan of one group of any role, beside the run's own: on bundles of its own, with the run's strategy.

    Example: ``plan_group(config, "length", Inference(num_gpus_per_node=2), gpus=False)``
    """
    unit = _unit(role, group)
    fractions = _gpu_fractions([unit], gpus)
    bundles = _bundles([unit], fractions)
    placement_group = _placement_group(config, role, [unit], bundles)
    return Plan("separate", gpus, (_members(unit, fractions, role),), (placement_group,))


def in_node_order(plan: Plan, nodes: Mapping[str, Sequence[str]]) -> Plan:
    """The plan with each role's slots dealt out by node, as placed.

    ``nodes``: placement group key -> for each bundle a sortable name of the node that it is on.
    """
    slots: dict[tuple[str, str], list[int]] = {}
    for group in plan.groups:
        for member in group.members:
            slots.setdefault((group.role, member.placement_group), []).extend(member.bundles)
    dealt = {
        (role, key): iter(sorted(taken, key=lambda slot, key=key: (nodes[key][slot], slot)))  # type: ignore[misc]
        for (role, key), taken in slots.items()
    }
    groups = []
    for group in plan.groups:
        members = []
        for member in group.members:
            pool = dealt[group.role, member.placement_group]
            bundles = tuple(next(pool) for _ in member.bundles)
            workers = bundles if member.worker_bundles else ()
            members.append(replace(member, bundle=bundles[0], worker_bundles=workers))
        groups.append(replace(group, members=tuple(members)))
    return replace(plan, groups=tuple(groups))


# ---- who shares what ---------------------------------------------------------------------------------------------


def _units(config: RunConfig) -> dict[str, _Unit]:
    units: dict[str, _Unit] = {"policy": _unit("policy", config.policy)}
    if config.has_critic:
        units["critic"] = _unit("critic", config.critic)
    if config.has_reference:
        units["reference"] = _unit("reference", config.reference)
    units["reward"] = _unit("reward", config.reward, on_gpu=config.reward.model is not None)
    rollout = config.rollout
    units["rollout"] = _Unit("rollout", rollout.resources, rollout.engines, rollout.tensor_parallel_size)
    return units


def _unit(role: str, group: Trained | Inference, on_gpu: bool = True) -> _Unit:
    members, per_node = group.num_nodes * group.num_gpus_per_node, group.num_gpus_per_node
    return _Unit(role, group.resources, members, per_node=per_node, on_gpu=on_gpu)


def _shares(config: RunConfig) -> list[tuple[str, list[_Unit]]]:
    """(key, roles that share its bundles) of each share of the cluster."""
    units = _units(config)
    colocation = config.placement.colocation
    if colocation == "all":
        return [("all", list(units.values()))]
    pairs: dict[str, tuple[str, str]] = {
        "policy_reference": ("policy", "reference"),
        "critic_reward": ("critic", "reward"),
    }
    shares: list[tuple[str, list[_Unit]]] = []
    pair = pairs.get(colocation)
    if pair is not None and all(role in units for role in pair):
        first, second = (units.pop(role) for role in pair)
        if (first.count, first.per_node) != (second.count, second.per_node):
            raise UserError(
                "placement.colocation",
                colocation,
                f"{pair[0]} and {pair[1]} share their devices one to one, but {pair[0]} has {first.shape} and "
                f"{pair[1]} has {second.shape}",
                "give both the same num_nodes and num_gpus_per_node, or set placement.colocation=separate",
            )
        shares.append(("+".join(pair), [first, second]))
    return shares + [(role, [unit]) for role, unit in units.items()]


def _gpu_fractions(units: Sequence[_Unit], gpus: bool) -> dict[str, float]:
    """GPUs of one device slot of each role: what the config says, else an equal share of what the others leave of 1."""
    if not gpus:
        return dict.fromkeys((unit.role for unit in units), 0.0)
    fractions: dict[str, float] = {}
    for unit in units:
        if unit.resources.gpus is not None:
            fractions[unit.role] = unit.resources.gpus
            _check_gpus(unit.role, unit.resources.gpus, shared=len(units) > 1)
    taken = sum(fractions.values())
    by_default = [unit.role for unit in units if unit.role not in fractions and unit.on_gpu]
    left = 1 - taken
    if len(units) > 1 and (left < 0 or (by_default and left * _PRECISION < len(by_default))):
        named = " + ".join(f"{role}.resources.gpus {amount:g}" for role, amount in fractions.items())
        others = f", and {', '.join(by_default)} would get nothing" if by_default else ""
        raise UserError(
            ", ".join(f"{role}.resources.gpus" for role in fractions),
            None,
            f"the roles on one device take {named} = {taken:g} of 1{others}",
            "lower these, or leave them out for equal shares",
        )
    for role in by_default:
        fractions[role] = math.floor(left / len(by_default) * _PRECISION) / _PRECISION if len(units) > 1 else 1.0
    return {unit.role: fractions.get(unit.role, 0.0) for unit in units}


def _check_gpus(role: str, gpus: float, shared: bool) -> None:
    if gpus > 1 and (shared or role == "rollout" or not float(gpus).is_integer()):
        reason = "one member can take at most 1 GPU where roles share devices" if shared else "Ray splits no second GPU"
        if role == "rollout":
            reason = "this is per device of an engine"
        raise UserError(f"{role}.resources.gpus", gpus, reason, "set it to 1 or less")


# ---- parts of the plan -------------------------------------------------------------------------------------------


def _bundles(units: Sequence[_Unit], fractions: Mapping[str, float]) -> tuple[dict[str, float], ...]:
    slots = [
        add_resources(_slot(unit, fractions[unit.role]) for unit in units if slot < unit.slots)
        for slot in range(max(unit.slots for unit in units))
    ]
    if len(units) > 1 and any(unit.on_gpu and unit.resources.gpus is None for unit in units):
        # Roles that share a device by default share a whole one: nobody else gets what rounding or small groups leave.
        slots = [slot | {"GPU": 1.0} if "GPU" in slot else slot for slot in slots]
    for unit in units:
        if not all(slots[: unit.slots]):
            reason = "a member that takes no resource at all cannot be placed by Ray"
            raise UserError(f"{unit.role}.resources.cpus", unit.resources.cpus, reason, "set it above 0, such as 0.1")
    return tuple(slots)


def _slot(unit: _Unit, gpus: float) -> dict[str, float]:
    amounts = {
        "CPU": unit.resources.cpus,
        "GPU": gpus,
        "memory": float(_memory(unit.resources)),
        **unit.resources.custom,
    }
    return {name: float(amount) for name, amount in amounts.items() if amount}


def _memory(resources: Resources) -> int:
    return parse_memory(resources.memory) if resources.memory is not None else 0


def _members(unit: _Unit, fractions: Mapping[str, float], key: str) -> GroupPlan:
    members = tuple(_member(unit, rank, key, rank, fractions[unit.role]) for rank in range(unit.count))
    return GroupPlan(unit.role, unit.role, members, unit.per_node)


def _engine(unit: _Unit, fractions: Mapping[str, float], engine: int, key: str, slot: int) -> GroupPlan:
    member = _member(unit, 0, key, slot, fractions[unit.role])
    if unit.width > 1:
        workers = tuple(range(slot, slot + unit.width))
        member = replace(member, gpus=0.0, worker_bundles=workers, worker_gpus=fractions[unit.role])
    return GroupPlan(rollout_group(engine), "rollout", (member,), 1)


def _member(unit: _Unit, rank: int, key: str, slot: int, gpus: float) -> MemberPlan:
    resources = unit.resources
    custom = dict(resources.custom)
    return MemberPlan(rank, key, slot, resources.cpus, gpus, _memory(resources), custom, resources.threads)


def _placement_group(
    config: RunConfig, key: str, units: Sequence[_Unit], bundles: tuple[dict[str, float], ...]
) -> PlacementGroupPlan:
    named = {unit.role: unit.resources.strategy for unit in units if unit.resources.strategy is not None}
    if len(set(named.values())) > 1:
        raise UserError(
            ", ".join(f"{role}.resources.strategy" for role in named),
            None,
            f"these roles share one placement group and want {', '.join(named.values())}",
            "give them one strategy, or set placement.strategy alone",
        )
    engine = len(units) == 1 and units[0].width > 1  # its devices talk all the time: one node, unless told otherwise
    strategy = next(iter(named.values()), "STRICT_PACK" if engine else config.placement.strategy)
    uses_gpus = any("GPU" in bundle for bundle in bundles)
    return PlacementGroupPlan(key, bundles, strategy, uses_gpus, tuple(unit.role for unit in units))


# ---- against a cluster -------------------------------------------------------------------------------------------


def check_fits(plan: Plan, nodes: Sequence[Mapping[str, float]]) -> None:
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


def _check_totals(plan: Plan, nodes: Sequence[Mapping[str, float]]) -> None:
    have = add_resources(nodes)
    for name, amount in plan.totals.items():
        if amount > have.get(name, 0.0) + 1e-6:
            parts = {
                group.key: add_resources(group.bundles).get(name, 0.0)
                for group in plan.placement_groups
                if any(name in bundle for bundle in group.bundles)
            }
            needed = ", ".join(f"{key} {in_units(name, part)}" for key, part in parts.items())
            raise UserError(
                "placement",
                None,
                f"the run needs {in_units(name, amount)} {name} ({needed}) and the cluster has "
                f"{in_units(name, have.get(name, 0.0))}; {describe(nodes)}",
                "use fewer or smaller members, share devices with placement.colocation, or add nodes",
            )


def _check_strict(group: PlacementGroupPlan, nodes: Sequence[Mapping[str, float]]) -> None:
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


def _check_counts(plan: Plan, nodes: Sequence[Mapping[str, float]]) -> None:
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


def _times(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How often a bundle fits an idle node."""
    return min((int(node.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items()), default=0)


def _misfit(group: PlacementGroupPlan, reason: str, next_step: str) -> UserError:
    return UserError(f"placement of {group.key}", None, reason, next_step)


def _keys(group: PlacementGroupPlan, key: str) -> str:
    return ", ".join(f"{role}.{key}" for role in group.roles)
