"""A controller of light members that is there to be killed: ``abandoned.py ADDRESS RUN_DIRECTORY ORPHAN_TIMEOUT``.

It says ``ready`` when everything stands, and then only keeps its members from exiting.
"""

import subprocess
import sys
import time

import ray
from local import light
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from linckia.api.config import RunConfig
from linckia.api.names import NAMESPACE, actor_name, placement_group_name
from linckia_trainer import start
from linckia_trainer.groups import keeper, placement
from linckia_trainer.groups.replace import note_processes
from linckia_trainer.log.store import Store

RUN = "abandoned"
WORD = "loaded"
HEAD = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0}  # of a cluster where the head takes no members


class Parent(light.LightMember):
    """Has a process of its own, as vLLM may, that outlives it."""

    def spawn(self) -> None:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)


def config_of(folder: str, orphan_timeout: float) -> RunConfig:
    return light.config(
        run={"name": RUN, "dir": folder},
        policy=light.members(1, 2),
        placement={"device": "cpu"},
        recovery={"orphan_timeout": orphan_timeout, "watch_seconds": min(5.0, orphan_timeout / 4)},
    )


def main(address: str, folder: str, orphan_timeout: float) -> None:
    light.LightMember = Parent  # type: ignore[misc]
    config = config_of(folder, orphan_timeout)
    store = Store(folder)
    planned = start.connect(config, address)
    with keeper.kept(config, 1):
        beacon = start.light_beacon(RUN, 1, "127.0.0.1", 1)
        ordered, placed = placement.place(planned, RUN, 60)
        groups = light.start(ordered, placed, RUN)
        for call in [group.start("spawn") for group in groups.values()]:
            call.results()
        for group in groups.values():
            group.call("declare_loaded", WORD)
            note_processes(store, group)
        groups["policy"].start("wait_for_attempt", 2)  # busy when its controller dies
        # A place that is not there, and a member that waits for it.
        waiting = placement_group([{"CPU": 1000}], name=placement_group_name(RUN, 90), lifetime="detached")
        pending = light.Holder.options(  # type: ignore[attr-defined]
            name=actor_name(RUN, "rollout-9", 1, 0),
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=PlacementGroupSchedulingStrategy(waiting, 0),
        ).remote()
        print("ready", flush=True)
        while True:
            for group in groups.values():
                group.ask_status()
            time.sleep(0.2)
        del beacon, pending


if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
