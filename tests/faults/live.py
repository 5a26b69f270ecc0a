"""A live run as seen and struck from outside: its control API, its processes, signals."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from local import bits, tiny

from linckia.api.access import find_token, read_run_file
from linckia.api.names import TOKEN_HEADER, role_of

START_SECONDS = 300
STEPS = 40
ROOT = Path(__file__).parents[2]
View = dict[str, Any]


def started(work: Path, name: str, *arguments: str, **sections: dict[str, Any]) -> "Live":
    """Start the run ``name`` in ``work``; every one of these has the golden run's records to come to."""
    config = tiny.write_config(work / name, name, **{"run": {"steps": STEPS}, **sections})
    return Live(work / name, config, *arguments)


class Live:
    """One ``linckia train`` of the run that is named like the folder ``place``."""

    def __init__(self, place: Path, config: Path, *arguments: str) -> None:
        self.place = place
        self.output = place / "output.txt"
        self.process = tiny.start(place, config, *arguments)

    def view(self) -> View | None:
        """``GET /v1/run`` of this process or of a controller that it started; None while nothing answers."""
        file = read_run_file(self.place / "runs" / self.place.name)
        if file is None or not self._is_ours(file.pid):
            return None
        try:
            return httpx.get(
                f"http://{file.api_address}/v1/run",
                headers={TOKEN_HEADER: find_token(self.place.name) or ""},
                timeout=10,
            ).json()
        except httpx.HTTPError:
            return None

    def _is_ours(self, pid: int) -> bool:
        try:
            return self.process.pid in (pid, psutil.Process(pid).ppid())
        except psutil.NoSuchProcess:
            return False

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """An order to the control API."""
        file = read_run_file(self.place / "runs" / self.place.name)
        assert file is not None
        headers = {TOKEN_HEADER: find_token(self.place.name) or ""}
        return httpx.post(f"http://{file.api_address}{path}", headers=headers, json=body, timeout=10)

    def await_view(self, condition: Callable[[View], bool], what: str, seconds: float = START_SECONDS) -> View:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended before {what}: {self.said()}"
            view = self.view()
            if view is not None and condition(view):
                return view
            time.sleep(0.001)
        raise AssertionError(f"never seen: {what}; {self.said()}")

    def pace(self, seconds: float) -> None:
        """Make every score take so much longer: few steps are used up while something is awaited.

        The run is never stopped for that: what is healed is taken over by its main loop, which has to come round.
        """
        written = self.place / "pace.new"
        written.write_text(str(seconds))
        written.replace(self.place / "pace")  # at once: nobody reads half of it

    def finish(self, seconds: float = START_SECONDS) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        return self.output.read_text()[-4000:]

    def kill(self) -> None:
        """SIGKILL the controller, Ray and every member."""
        tiny.kill_tree(self.process)


def pid_of(view: View, group: str, rank: int = 0) -> int:
    return int(view["groups"][group]["members"][rank]["pid"])


def stands(view: View, group: str) -> bool:
    """Whether a group's members are those of its present generation, and were heard of."""
    shown = view["groups"][group]
    return bool(shown["members"]) and all(one["generation"] == shown["generation"] for one in shown["members"])


def left_running(place: Path) -> list[str]:
    """Command lines of processes that a run in ``place`` left behind."""
    left = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        if (process.info["environ"] or {}).get("PWD", "").startswith(str(place)) or str(place) in words:
            left.append(words)
    return left


def await_nothing_left(place: Path) -> None:
    deadline = time.monotonic() + 10
    while left_running(place) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_running(place) == []


def recoveries(place: Path) -> list[dict[str, Any]]:
    """What the run wrote down of each recovery, in the order in which they began."""
    return [json.loads(path.read_text()) for path in sorted((place / "runs" / place.name / "recoveries").glob("*.end"))]


def note_strikes(fault: str, place: Path, strikes: list[tuple[str, str, int]]) -> None:
    """Write down what was struck, (group, stage, generation) each, and what it cost: ``make faults`` makes a table of it.

    Generation 0: nobody was lost.
    """
    costs = {(one["group"], one["generation_lost"]): one for one in recoveries(place)}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    folder = ROOT / "build" / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "strikes.jsonl").open("a") as file:
        for group, stage, generation in strikes:
            cost = costs[group, generation] if generation else {"seconds": {}, "seconds_total": 0.0}
            row = {"commit": commit, "fault": fault, "stage": stage, "role": role_of(group), "group": group}
            row |= {"seconds": cost["seconds"], "seconds_total": cost["seconds_total"]}
            file.write(json.dumps(row) + "\n")


def assert_equal_runs(place: Path, golden: Path) -> None:
    """Records, chain, weights, optimizer states and consumed trajectories of two finished runs, bit for bit."""
    assert len(bits.payload_hashes(golden)) == STEPS
    assert bits.payload_hashes(place) == bits.payload_hashes(golden)
    assert bits.log_hashes(place) == bits.log_hashes(golden)
    for group, ranks in (("policy", 2), ("critic", 1)):
        wanted = bits.state_hashes(golden, group, STEPS)
        assert sorted(wanted) == list(range(ranks))
        assert bits.state_hashes(place, group, STEPS) == wanted
    keys = bits.trajectory_keys(place)
    assert len(keys) == len(set(keys))
    assert keys == bits.trajectory_keys(golden)
