"""What a run listed of its processes, read back."""

import json
from pathlib import Path
from typing import Any

from linckia_trainer.groups.leftovers import listed_processes
from linckia_trainer.log.store import Store


def process(pid: int) -> dict[str, Any]:
    return {"node": "10.0.0.1", "node_id": "n", "pid": pid, "start_time": 10 * pid}


def test_every_list_but_those_of_spared_generations(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for pid, key in enumerate(("policy/1", "policy/2", "rollout-0/2", "rollout-0/12")):
        store.put(f"generations/{key}", b"{}")
        store.put(f"generations/{key}.pids", json.dumps([process(pid)]).encode())
    assert sorted(one["pid"] for one in listed_processes(store)) == [0, 1, 2, 3]
    spared = listed_processes(store, {("policy", 2), ("rollout-0", 1), ("rollout-0", 2)})
    assert sorted(one["pid"] for one in spared) == [0, 3]


def test_a_damaged_list_hides_no_other(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("generations/critic/1.pids", b'[{"pid": 4')
    store.put("generations/policy/1.pids", json.dumps([process(7)]).encode())
    assert listed_processes(store) == [process(7)]


def test_a_run_that_never_began_lists_nothing(tmp_path: Path) -> None:
    assert listed_processes(Store(str(tmp_path / "new"))) == []
