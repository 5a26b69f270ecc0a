"""From a plan to standing groups: placement, actors, rendezvous, models; all roles start side by side."""

import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, UserError
from linckia.api.names import NAMESPACE, beacon_name
from linckia.api.plan import Plan, plan
from linckia_trainer.adopt import Adopted, adopt
from linckia_trainer.groups import placement
from linckia_trainer.groups.fence import fence
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.replace import STATEFUL, Site, load_all, loaded_word, note_processes, replaced, start
from linckia_trainer.log import attempts
from linckia_trainer.log.store import Store

Say = Callable[[str], None]


@dataclass
class Standing:
    """The groups of an attempt, and the site they stand on."""

    groups: dict[str, ActorGroup]
    site: Site
    on_gpus: bool

    def remove(self) -> None:
        """Kill every member and give the devices back; nothing of it if a newer attempt goes on with them."""
        if replaced(self.site):
            return
        for group in self.groups.values():
            fence(group.members, group.processes)
        placement.release(self.site.placed)


def connect(config: RunConfig, address: str | None) -> Plan:
    """Connect to the cluster at ``address``, or start Ray in this process's machine; returns the run's plan."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray prints ten lines over the progress for each worker that dies; the healer says it in one, with what follows.
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        try:
            reach(address)
            ray.init(address=address, **settings)
        except OSError as error:  # ConnectionError is one
            raise UserError(
                "--address", address, f"no Ray cluster answers there ({error})", "start one, or leave it out"
            ) from error
        return plan(config, on_gpus(config))
    cores = os.cpu_count() or 1
    # Without a cluster nobody else shares the machine: its members may share cores, so logical CPUs follow the plan, with
    # room for engines that are added later.
    wanted = 2 * plan(config, config.placement.device == "gpu").totals.get("CPU", 0.0)
    if config.recovery.watcher == "embedded":  # it looks at Ray's state API
        settings |= {"include_dashboard": True, "dashboard_port": 0}
    else:
        settings["include_dashboard"] = False
    ray.init(address="local", num_cpus=max(cores, math.ceil(wanted)), **settings)
    return plan(config, on_gpus(config))


def state_api_address() -> str | None:
    """Where Ray's state API answers, host:port; None if this Ray has none."""
    return ray._private.worker.get_dashboard_url() or None


def reach(address: str) -> None:
    """Raise OSError if nothing listens at ``address``, host:port; Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def on_gpus(config: RunConfig) -> bool:
    """Whether the run uses GPUs; UserError when it has to and the cluster has none."""
    there = ray.cluster_resources().get("GPU", 0) > 0
    if config.placement.device == "gpu" and not there:
        raise UserError("placement.device", "gpu", "the cluster has no GPU", "set it to cpu, or give the cluster GPUs")
    return there and config.placement.device != "cpu"


@ray.remote(num_cpus=0)
class Beacon:
    """Says by its name where a controller listens, and dies with it."""

    def ping(self) -> bool:
        return True


def light_beacon(run: str, attempt: int, ip: str, port: int) -> Any:
    beacon = Beacon.options(name=beacon_name(run, attempt, ip, port), namespace=NAMESPACE).remote()  # type: ignore[attr-defined]
    ray.get(beacon.ping.remote())
    return beacon


def beacon_alive(info: attempts.AttemptInfo, run: str) -> bool:
    """Whether an attempt's beacon stands in the cluster we are connected to."""
    if info.ray_address != ray.get_runtime_context().gcs_address:
        return False
    prefix = f"{run}/controller/{info.attempt}/"
    return any(one["name"].startswith(prefix) for one in ray.util.list_named_actors(all_namespaces=True))


def start_groups(config: RunConfig, planned: Plan, store: Store, attempt: int, origin: str, say: Say) -> Standing:
    """The groups that stand, adopted; the others placed, started and loaded, all side by side."""
    if attempts.superseded(store, attempt):  # what stands in the cluster is the newer one's
        raise FencedError(f"attempt {attempt} was replaced by a newer one")
    adopted = adopt(config, planned, store, attempt, loaded_word(config, origin))
    if adopted is None:
        say(f"placing {len(planned.groups)} groups")
        adopted = Adopted({}, *placement.place(planned, config.run.name, config.placement.timeout), {})
    else:
        say(f"adopting {', '.join(sorted(adopted.groups))}")
    plans = {group.name: group for group in adopted.plan.groups}
    device = "cuda" if planned.gpus else "cpu"
    site = Site(config, store, attempt, origin, device, plans, adopted.placed, adopted.unplaced)
    standing = Standing(dict(adopted.groups), site, planned.gpus)
    try:
        # Engines take longest to start: they go first.
        missing = sorted(plans.keys() - adopted.groups.keys(), key=lambda one: (plans[one].role != "rollout", one))
        for name in missing:
            standing.groups[name] = start(site, name)
        if missing:
            say(f"loading models: {', '.join(missing)}")
        load_all(config, origin, [standing.groups[name] for name in missing])
        if config.storage.node_memory is not None:
            check_node_memory(config, [standing.groups[name] for name in STATEFUL if name in missing])
        for group in standing.groups.values():
            note_processes(store, group)
    except BaseException:
        standing.remove()
        raise
    return standing


def check_node_memory(config: RunConfig, stateful: list[ActorGroup]) -> None:
    """UserError if the states that storage.node_memory asks for do not fit into some node's memory."""
    needs: dict[str, int] = {}
    for group in stateful:
        for node, need, free in group.call("node_memory_needs"):
            needs[node] = needs.get(node, 0) + need
            if needs[node] > free:
                raise UserError(
                    "storage.node_memory",
                    config.storage.node_memory_dir,
                    f"the states of one node take up to {needs[node] / 1e9:.1f} GB there and {free / 1e9:.1f} GB are free",
                    "free or enlarge it, or set storage.node_memory: null to keep states in the run directory alone",
                )
