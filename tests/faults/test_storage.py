"""Faults that are no crash, struck in one live run: a full disk, damaged states, slow and failing storage, a straggler, no
memory.

The run directory is on a filesystem that is unsteady when it is told to, the states in node memory on a small disk.
"""

import contextlib
import hashlib
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults import unsteady
from faults.live import (
    STEPS,
    Live,
    View,
    assert_equal_runs,
    await_nothing_left,
    note_strikes,
    pid_of,
    recoveries,
    stands,
    started,
)

from linckia.faults import inject
from linckia_trainer.log.process import start_time

HEALED_SECONDS = 120
DISK = "96m"  # room for every state in node memory, and soon full
WATCHED = {"watch_seconds": 1}
FAILS_SECONDS = 4
SLOW_SECONDS = 8
PACE_SECONDS = 2  # of each score: two looks of the watcher, so that what a step saved is seen within it
DURABLE_EVERY = 3
ROOM = 256 << 20  # bytes of address space: enough for its threads, not for what it asks for
# Faults that nobody is lost by: where they bite first.
STORAGE = {"full disk": ("policy", "save", 0), "straggler": ("policy", "update", 0)} | {
    f"{kind} storage": ("policy", "record", 0) for kind in ("slow", "failing", "flaky")
}


@dataclass
class Struck:
    """What was struck and the witnesses that it was. ``losses``: (group, stage, generation) of groups that had to heal."""

    place: Path
    seen: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def struck(work: Path, golden: Path) -> Iterator[Struck]:
    place = work / "storage"
    unsteady.install(work / "plugins")
    with pytest.MonkeyPatch.context() as patch, small_disk(work / "small_disk"):
        patch.setenv("PYTHONPATH", f"{work / 'plugins'}:{os.environ.get('PYTHONPATH', '')}")
        live = started(
            work,
            "storage",
            run={"steps": STEPS, "dir": f"unsteady://{place}/runs/storage"},
            storage={
                "options": {"switch": str(place / "weather.json")},
                "node_memory_dir": str(work / "small_disk"),
                "run_directory": {"every": DURABLE_EVERY, "keep": 2},
                "spool_seconds": 5,
            },
            recovery=WATCHED,
        )
        found = Struck(place)
        try:
            fill_disk(live, found, work / "small_disk")
            damage(live, found, work / "small_disk", "policy", inject.corrupt_state)
            damage(live, found, work / "small_disk", "critic", inject.truncate_state)
            slow_storage(live, found)
            failing_storage(live, found)
            flaky_storage(live, found)
            slow_rank(live, found)
            take_memory(live, found)
            assert live.finish() == 0, live.said()
            for fault, (group, stage, generation) in {**STORAGE, **found.losses}.items():
                where = recovery_of(found, fault)["stage"] if generation else stage
                note_strikes(fault, place, [(group, where, generation)])
            yield found
        finally:
            live.kill()


def fill_disk(live: Live, struck: Struck, disk: Path) -> None:
    live.await_view(lambda view: view["step"] > 2 and "log_head" in view, "two steps")
    live.pace(PACE_SECONDS)
    free = []

    def said(view: View) -> bool:
        """Whether the full disk is said. Room that a state just deleted has left is filled up again at each look."""
        with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        free.append(psutil.disk_usage(str(disk)).free)
        return any("was not written to node_memory" in one for one in view["warnings"])

    view = live.await_view(said, "a full disk said")
    struck.seen["bytes_free"] = min(free)
    struck.warnings += view["warnings"]
    full = view["log_head"]
    struck.seen["newest_while_full"] = newest_saved(view)
    live.await_view(lambda view: view["log_head"] >= full + 2, "steps while the disk is full")
    (disk / "filler").unlink()
    view = live.await_view(lambda view: newest_saved(view) > full + 2, "states saved again")
    struck.seen["newest_after"] = newest_saved(view)


def damage(live: Live, struck: Struck, disk: Path, group: str, fault: Any) -> None:
    """Damage the newest state in node memory of rank 0, then kill it (the fault does both)."""
    view = live.await_view(
        lambda view: (
            view["stage"] == "score"
            and at_work(view, group)
            and newest_saved(view) == view["log_head"]
            and view["log_head"] % DURABLE_EVERY != 0  # else the run directory has the same state, whole
        ),
        f"{group} saved",
    )
    [folder] = [path for path in disk.iterdir() if path.is_dir()]
    pid, generation = pid_of(view, group), view["groups"][group]["generation"]
    aim = inject.Aim(group, 0, pid, start_time(pid), generation, states=(folder,))
    [path] = inject.newest_states(aim)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    fault(aim)
    changed = hashlib.sha256(path.read_bytes()).hexdigest() != before
    struck.losses[fault.__name__.replace("_", " ")] = (group, "score", generation)
    healed = live.await_view(
        lambda view: view["groups"][group]["generation"] > generation and at_work(view, group),
        f"{group} healed",
        HEALED_SECONDS,
    )
    struck.warnings += healed["warnings"]
    struck.seen[fault.__name__] = {
        "key": path.relative_to(folder).as_posix(),
        "changed": changed,
        "gone": start_time(pid) is None,
        "applied": times_applied(struck.place, group, int(path.parts[-3])),
    }


def at_work(view: View, group: str) -> bool:
    """Whether a group stands and has been brought to the head of the log."""
    return stands(view, group) and not view["groups"][group]["returning"]


def times_applied(place: Path, group: str, step: int) -> int:
    """How often a group has applied a step's record: it tells its metrics each time."""
    rows = map(json.loads, (place / "runs/storage/metrics.jsonl").read_text().splitlines())
    return sum(f"{group}/grad_norm" in row for row in rows if row["step"] == step)


def newest_saved(view: View) -> int:
    """The newest step of which every rank of policy and critic has a state in node memory."""
    members = [one for group in ("policy", "critic") for one in view["groups"][group]["members"]]
    return min((one["saved"].get("node_memory", -1) for one in members), default=-1)


def weather(live: Live, **wanted: Any) -> None:
    file = live.place / "weather.json"
    aside = live.place / "weather.new"
    aside.write_text(json.dumps({"slow": 0, "fail": "", "below": ["log", "state"], **wanted}))
    aside.replace(file)


def witnesses(live: Live) -> list[str]:
    file = live.place / "struck.txt"
    return file.read_text().splitlines() if file.exists() else []


def written(lines: list[str], what: str, folder: str) -> bool:
    """Whether a write below ``folder`` was "slowed", or "failed"."""
    return any(line.startswith(f"{what} write") and f"/{folder}/" in line for line in lines)


def slow_storage(live: Live, struck: Struck) -> None:
    weather(live, slow=0.3)
    head = live.await_view(lambda view: view["groups"] != {}, "a look")["log_head"]
    live.await_view(
        lambda view: view["log_head"] >= head + 2 and written(witnesses(live), "slowed", "state"), "slow states"
    )
    struck.seen["slowed"] = witnesses(live)


def failing_storage(live: Live, struck: Struck) -> None:
    """All that has to do with log and states fails for some seconds, from a commit on."""
    before = len(witnesses(live))
    weather(live, fail="all", slow=0)
    view = live.await_view(lambda view: any("it is asked again" in one for one in view["warnings"]), "failures said")
    struck.warnings += view["warnings"]
    head = view["log_head"]
    with contextlib.suppress(AssertionError):  # nothing is awaited: the storage fails that long
        live.await_view(lambda view: view["log_head"] > head + 1, "no step", FAILS_SECONDS)
    struck.seen["failed"] = witnesses(live)[before:]
    (live.place / "weather.json").unlink()
    live.await_view(lambda view: view["log_head"] > head + 1, "steps on the storage that is back")


def flaky_storage(live: Live, struck: Struck) -> None:
    before = len(witnesses(live))
    weather(live, fail="some")
    head = live.await_view(lambda view: view["groups"] != {}, "a look")["log_head"]
    live.await_view(
        lambda view: view["log_head"] >= head + 3 and written(witnesses(live)[before:], "failed", "log"),
        "flaky commits",
    )
    struck.seen["flaky"] = witnesses(live)[before:]
    (live.place / "weather.json").unlink()


def slow_rank(live: Live, struck: Struck) -> None:
    """A straggler is waited for. (The watcher does not name it here: it compares members that it has seen at three looks
    in one stage, and no stage of this run lasts that long.)"""
    view = live.await_view(lambda view: stands(view, "policy"), "policy stands")
    pid, head = pid_of(view, "policy", 1), view["log_head"]
    aim = inject.Aim("policy", 1, pid, start_time(pid), view["groups"]["policy"]["generation"], seconds=SLOW_SECONDS)
    striking = threading.Thread(target=inject.slow, args=[aim])
    striking.start()
    looks = []
    while striking.is_alive():
        looks.append(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        time.sleep(0.013)
    struck.seen["slow_rank"] = (sum(looks) / len(looks), start_time(pid) == aim.started)
    live.await_view(lambda view: view["log_head"] > head, "steps with a straggler")


def take_memory(live: Live, struck: Struck) -> None:
    """No further memory for the reward's member, and then its function asks for much."""
    view = live.await_view(lambda view: view["stage"] == "generate" and stands(view, "reward"), "the reward stands")
    pid, generation = pid_of(view, "reward"), view["groups"]["reward"]["generation"]
    used = psutil.Process(pid).memory_info().vms
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (used + ROOM, most))
    struck.seen["memory"] = (resource.prlimit(pid, resource.RLIMIT_AS)[0], used)
    hungry = live.place / "hungry"
    hungry.touch()  # not before the limit: what it asked for then, it would get
    live.await_view(
        lambda view: view["groups"]["reward"]["generation"] > generation and at_work(view, "reward"),
        "the reward healed",
        HEALED_SECONDS,
    )
    live.pace(0)
    struck.seen["asked"] = not hungry.exists()
    struck.losses["no memory"] = ("reward", "score", generation)


def recovery_of(struck: Struck, fault: str) -> dict[str, Any]:
    group, _, generation = struck.losses[fault]
    [found] = [one for one in recoveries(struck.place) if (one["group"], one["generation_lost"]) == (group, generation)]
    return found


def test_a_full_disk_is_said_and_the_run_saves_again_when_there_is_room(struck: Struck) -> None:
    assert struck.seen["bytes_free"] == 0
    assert any("no space left" in one for one in struck.warnings)
    assert struck.seen["newest_after"] > struck.seen["newest_while_full"]


@pytest.mark.parametrize("fault", ["corrupt_state", "truncate_state"])
def test_a_damaged_state_is_refused_and_said_and_an_older_one_is_replayed_from(struck: Struck, fault: str) -> None:
    seen = struck.seen[fault]
    assert seen["changed"]
    assert seen["gone"]
    assert any(seen["key"] in one for one in struck.warnings)
    assert seen["applied"] == 2  # without damage it would not be replayed: the newest state is that after it


def test_slow_storage_ends_nothing(struck: Struck) -> None:
    assert written(struck.seen["slowed"], "slowed", "log")
    assert written(struck.seen["slowed"], "slowed", "state")


@pytest.mark.parametrize("kind", ["failed", "flaky"])
def test_failing_storage_is_asked_again(struck: Struck, kind: str) -> None:
    assert written(struck.seen[kind], "failed", "log")
    assert any("it is asked again for up to 300 s" in one for one in struck.warnings)


def test_a_straggler_is_waited_for(struck: Struck) -> None:
    stopped, alive = struck.seen["slow_rank"]
    assert 0.7 < stopped < 1
    assert alive


def test_a_member_without_memory_is_lost_and_healed(struck: Struck) -> None:
    limit, used = struck.seen["memory"]
    assert limit == used + ROOM
    assert struck.seen["asked"]
    found = recovery_of(struck, "no memory")
    assert (found["kind"], found["cause"].partition(":")[0]) == ("exception", "MemoryError")


def test_the_run_ends_with_the_golden_bits(golden: Path, struck: Struck) -> None:
    assert_equal_runs(struck.place, golden)
    assert sorted((one["group"], one["generation_lost"]) for one in recoveries(struck.place)) == sorted(
        (group, generation) for group, _, generation in struck.losses.values()
    )
    assert [path.name for path in (struck.place / "runs/storage/attempts").glob("*") if path.suffix == ""] == ["1"]
    await_nothing_left(struck.place)
