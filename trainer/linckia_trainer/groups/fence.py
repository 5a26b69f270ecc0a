"""Fencing: no process of a lost generation may still hold a device, a port or a chance to write."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from linckia_trainer.log.process import start_time

GONE_SECONDS = 10.0
POLL_SECONDS = 0.01

Process = Mapping[str, Any]  # {"node": ip, "node_id": Ray's, "pid": int, "start_time": clock ticks since boot}


def fence(members: Iterable[Any], processes: Sequence[Process]) -> list[Process]:
    """Kill the actors and every listed process on nodes that can be reached; returns those that are still there.

    A pid is killed only together with its start time, so that nobody else's process is hit. A node that is gone holds
    no process that could do harm: its members hear of no attempt and exit by themselves.
    """
    for member in members:
        ray.kill(member)
    here = ray.util.get_node_ip_address()
    local = [one for one in processes if one["node"] == here]
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    remote: dict[str, list[Process]] = {}
    for one in processes:
        if one["node"] != here and one.get("node_id") in alive:
            remote.setdefault(one["node_id"], []).append(one)
    calls = [
        ray.remote(kill_listed)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(listed)
        for node_id, listed in remote.items()
    ]
    left = kill_listed(local)
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=2 * GONE_SECONDS) if calls else ([], [])
    for call in done:
        try:
            left += ray.get(call)
        except ray.exceptions.RayError:
            continue  # the node went meanwhile, and its processes with it
    return left


def kill_listed(processes: Sequence[Process], within: float = GONE_SECONDS) -> list[Process]:
    """SIGKILL those of this machine's listed processes that still run, and wait; returns those that did not go."""
    left = [one for one in processes if still_runs(one)]
    for one in left:
        try:
            os.kill(one["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + within
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [one for one in left if still_runs(one)]
    return left


def still_runs(process: Process) -> bool:
    return process["start_time"] is not None and start_time(process["pid"]) == process["start_time"]
