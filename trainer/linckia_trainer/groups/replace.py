"""One lost generation becomes the next: fenced, placed, started, joined, loaded. Restoring its state comes after."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, UserError
from linckia.api.plan import GroupPlan, PlacementGroupPlan
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.fence import fence
from linckia_trainer.groups.group import ActorGroup, Call, start_group
from linckia_trainer.groups.placement import Placed, place_more
from linckia_trainer.log import attempts
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.patience import NOTE_SECONDS, Patience
from linckia_trainer.log.store import Store
from linckia_trainer.roles import member_class

STATEFUL = ("policy", "critic")
STANDBY_SECONDS = 2.0  # within which a standby answers, or is none


@dataclass
class Site:
    """Where a run's groups stand, and what a member needs to be started there."""

    config: RunConfig
    store: Store
    attempt: int
    origin: str
    device: str
    plans: dict[str, GroupPlan]
    placed: Placed
    unplaced: dict[str, PlacementGroupPlan] = field(default_factory=dict)  # of engines that were asked for later
    standbys: dict[str, list[ActorGroup]] = field(default_factory=dict)  # next generations, their imports done


@dataclass
class Parts:
    """Seconds by part of one recovery, in the order of the path."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def start(site: Site, name: str, standby: bool = False) -> ActorGroup:
    """Start the members of the next generation of a group in their bundles, without waiting for them.

    A standby takes none of its bundle's resources: the member whose place it will take still holds them.
    """
    for key in {member.placement_group for member in site.plans[name].members} & site.unplaced.keys():
        site.placed[key] = place_more(site.unplaced[key], site.config.run.name, site.config.placement.timeout)
        del site.unplaced[key]
    generation = attempts.claim_generation(site.store, name)
    return start_group(
        member_class(site.plans[name].role),
        site.plans[name],
        site.placed,
        site.config.run.name,
        site.attempt,
        generation,
        site.device,
        site.config.recovery.orphan_timeout,
        standby,
    )


def start_standbys(site: Site, name: str) -> None:
    """Fill a group's standbys up to ``recovery.standbys``, and have them import what they will need."""
    waiting = site.standbys.setdefault(name, [])
    if any(member.worker_bundles for member in site.plans[name].members):
        return  # an engine over several devices lives in workers that vLLM starts
    while len(waiting) < site.config.recovery.standbys:
        standby = start(site, name, standby=True)
        standby.start("prepare", site.config)
        waiting.append(standby)


def next_generation(site: Site, group: ActorGroup) -> ActorGroup:
    """A standby of the group if a living one waits, else members started now. Devices are those of the lost members."""
    waiting = site.standbys.get(group.name, [])
    while waiting:
        standby = waiting.pop(0)
        answers = standby.ask_status()
        try:
            answers.results(timeout=STANDBY_SECONDS)
        except (GroupLostError, ray.exceptions.GetTimeoutError):
            standby.kill()
            continue
        standby.call("take_devices", group.devices)
        return standby
    return start(site, group.name)


def replace(site: Site, group: ActorGroup, parts: Parts, forming: Callable[[ActorGroup], None]) -> ActorGroup:
    """Fence ``group`` and bring up its next generation with its models loaded; ``forming`` hears of it at once.

    Raises GroupLostError of the new generation if it is lost on the way, UserError if no place is found for it in time,
    FencedError if a newer attempt was claimed: what this one finds dead is the newer one's business.
    """
    refuse_if_replaced(site)
    with parts.part("fence"):
        fence(group.members, group.processes)
    with parts.part("place"):
        successor = next_generation(site, group)
    try:
        forming(successor)
        with parts.part("start"):
            await_members(site, successor)
            note_processes(site.store, successor)
        with parts.part("rendezvous"):
            loading = load(site.config, site.origin, successor)
        with parts.part("load"):
            for call in loading:
                call.results()
            successor.call("declare_loaded", loaded_word(site.config, site.origin))
            note_processes(site.store, successor)
    except BaseException:
        fence(successor.members, successor.processes)
        raise
    return successor


def replaced(site: Site) -> bool:
    """Whether a newer attempt was claimed. A storage that does not answer says nothing about that."""
    try:
        return attempts.superseded(site.store.patient(Patience(NOTE_SECONDS)), site.attempt)
    except (OSError, UserError):
        return False


def refuse_if_replaced(site: Site) -> None:
    """FencedError if a newer attempt was claimed."""
    if replaced(site):
        raise FencedError(f"attempt {site.attempt} was replaced by a newer one")


def await_members(site: Site, group: ActorGroup) -> None:
    """Wait until every member's process runs; UserError that says what the cluster lacks if one finds no place."""
    timeout = site.config.placement.timeout
    statuses = group.ask_status()
    _, waiting = ray.wait(statuses.refs, num_returns=len(statuses.refs), timeout=timeout)
    if waiting:
        raise UserError(
            "placement.timeout",
            timeout,
            f"{len(waiting)} of {len(statuses.refs)} members of {group.name} found no place in that time after theirs was lost; "
            f"the cluster has {ray.available_resources()} free",
            "give the cluster a node in place of the one it lost, and type the same command again",
        )
    statuses.results()


def load_all(config: RunConfig, origin: str, groups: Sequence[ActorGroup]) -> None:
    """Load every group's models, side by side: all begin before any trained group waits for its members to meet."""
    ordered = sorted(groups, key=lambda group: group.name in STATEFUL)
    for call in [call for group in ordered for call in load(config, origin, group)]:
        call.results()
    for call in [group.start("declare_loaded", loaded_word(config, origin)) for group in groups]:
        call.results()


def loaded_word(config: RunConfig, origin: str) -> str:
    """What a member says of itself once it is loaded: it serves another attempt only if that would have loaded the same."""
    content = {"config": config.model_dump(mode="json"), "origin": origin}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def load(config: RunConfig, origin: str, group: ActorGroup) -> list[Call]:
    """Rendezvous of a trained group, then ``load``; returns the calls that are on their way."""
    fetching = group.start("fetch", config)
    if group.name not in STATEFUL:
        return [fetching, group.start("load", config)]
    host, port = group.first("open_rendezvous")
    return [
        fetching,
        group.start("join", host, port, config.recovery.collective_timeout),
        group.start("load", config),
        group.start("begin", config, origin),
    ]


def note_processes(store: Store, group: ActorGroup) -> None:
    """What has to be gone once this generation is fenced: (node, pid, start time) of every process of it."""
    statuses = group.status()
    group.devices = [status["devices"] for status in statuses]
    group.processes = [
        {"node": status["node_ip"], "node_id": status["node_id"], **process}
        for status in statuses
        for process in status["processes"]
    ]
    store.put(f"generations/{group.name}/{group.generation}.pids", json.dumps(group.processes).encode())
