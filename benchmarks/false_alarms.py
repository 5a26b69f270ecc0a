"""Whether the watcher restarts what is healthy, finds what hangs, and sees who is slow: simulated runs, the real rules.

Runs are drawn from false_alarms.yaml; every look calls the real ``learn`` and ``decide`` with the default policy.
Goals: no restart of a healthy group in 100 runs of 24 hours; at least 99% of hangs found within 3 times the P99.9 of the
stage's time. Prints JSON. Only looks between which something changes are made: from one change to the next nothing but
the quiet time grows, so the last look before each change sees all that those between could have seen.
"""

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from linckia.api.config import Recovery
from linckia.api.names import actor_name, role_of
from linckia.decide.history import History, learn
from linckia.decide.limits import WatchPolicy, stage_limit
from linckia.decide.rules import Decision, decide, remember
from linckia.observe.observation import IDLE, ActorSeen, GroupSeen, MemberSeen, NodeSeen, Observation, RayState

DISTRIBUTIONS = Path(__file__).with_suffix(".yaml")
RUN = "simulated"
COLLECTIVE = ("update", "save", "sync")  # all of a group go in step; in sync policy and engines do
QUANTILE = 0.999
ALLOWED = 3.0
Member = tuple[str, int]


@dataclass
class Work:
    """One member's part of a stage: a tick at each of ``ticks``, then idle from ``end`` on (never, once it hangs)."""

    stage: str
    ticks: list[float]
    end: float


@dataclass
class Hang:
    """What was put in: ``group`` shows no progress from ``at`` on, in ``stage``."""

    member: Member
    stage: str
    at: float
    stopped: bool
    allowed_seconds: float


@dataclass
class Result:
    """What came of one run."""

    looks: int = 0
    steps: int = 0
    hours: float = 0.0
    closest: tuple[float, str] = (0.0, "")
    healthy_restarts: list[str] = field(default_factory=list)
    hangs: list[dict[str, Any]] = field(default_factory=list)
    reports: Counter[str] = field(default_factory=Counter)
    straggler: str = ""
    found_after_hours: float | None = None


class Simulation:
    """One run. Time is in seconds from its start."""

    def __init__(self, spec: dict[str, Any], mode: str, number: int, hours: float) -> None:
        self.spec = spec
        self.mode = mode
        self.random = random.Random(f"{spec['seed']}/{mode}/{number}")
        self.ends = hours * 3600
        self.policy = WatchPolicy(Recovery(), {("reward", "score"): 600.0})
        self.interval = self.policy.recovery.watch_seconds
        self.generations = dict.fromkeys(spec["groups"], 1)
        self.members: list[Member] = [(name, rank) for name, size in spec["groups"].items() for rank in range(size)]
        self.done = dict.fromkeys(self.members, 0)
        self.work: dict[Member, Work] = {}
        self.ticks: dict[tuple[str, str], int] = {}
        self.seen_stages: set[tuple[str, str]] = set()
        self.history = History()
        self.look_number = -1
        self.step, self.stage = 0, "load"
        self.hang: Hang | None = None
        self.slow: tuple[Member, float] | None = None
        self.api_gaps = self._gaps(spec["state_api_gaps"])
        self.blackouts = self._gaps(spec["blackouts"])
        self.silences = {member: self._gaps(spec["silences"]) for member in self.members}
        self.unseen = [self.api_gaps, self.blackouts, *self.silences.values()]
        self.result = Result(hours=hours)
        if mode == "stragglers":
            factors = spec["stragglers"]["factors"]
            self.slow = (self.random.choice(self.members), factors[number % len(factors)])
            self.result.straggler = f"{role_of(self.slow[0][0])} x{self.slow[1]:g}"

    # ---- what is drawn -------------------------------------------------------------------------------------------

    def _lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(self.random.gauss(0, sigma))

    def _gaps(self, kind: list[float]) -> list[tuple[float, float]]:
        """(begin, end) of everything that the watcher cannot see, in order."""
        per_hour, median, sigma = kind
        found, at = [], 0.0
        while per_hour and (at := at + self.random.expovariate(per_hour / 3600)) < self.ends:
            found.append((at, at := at + self._lognormal(median, sigma)))
        return found

    def _duration(self, role: str, stage: str, median: float) -> float:
        spec = self.spec
        seconds = self._lognormal(median, spec["sigma"])
        if self.random.random() < spec["slow_share"]:
            seconds *= spec["slow_factor"]
        if (role, stage) not in self.seen_stages:
            self.seen_stages.add((role, stage))
            seconds *= spec["first_time_factor"]
        return seconds

    def _num_ticks(self, role: str, stage: str) -> int:
        low, high = self.spec["ticks"]
        drawn = round(math.exp(self.random.uniform(math.log(low), math.log(high))))
        return self.ticks.setdefault((role, stage), drawn)

    def _work(self, stage: str, start: float, seconds: float, count: int) -> Work:
        part = seconds / count
        ticks = [start + (number + self.random.random()) * part for number in range(count)]
        return Work(stage, ticks, start + seconds)

    def _slowed(self, members: list[Member], start: float) -> float:
        if self.slow is None or start < self.spec["stragglers"]["from_hour"] * 3600:
            return 1.0
        return self.slow[1] if self.slow[0] in members else 1.0

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        now = self._load(list(self.spec["groups"]), 0.0)
        while now < self.ends:
            self.step += 1
            planned = self._planned_hang()
            for stage, medians in self.spec["stages"].items():
                now = self._run_stage(stage, medians, now, planned if planned and planned[1] == stage else None)
                if now >= self.ends:
                    break
        if self.hang is not None:
            self._found(self.hang, math.inf, "not found")
        self.result.steps = self.step
        return self.result

    def _planned_hang(self) -> tuple[str, str] | None:
        """(role, stage) of this step's hang, if it has one."""
        if self.mode != "hangs" or self.random.random() >= self.spec["hangs"]["share_of_steps"]:
            return None
        pairs = [(role, stage) for stage, medians in self.spec["stages"].items() for role in medians]
        return self.random.choice(pairs)

    def _load(self, groups: list[str], start: float) -> float:
        self.stage = "load"
        for name in groups:
            for member in [one for one in self.members if one[0] == name]:
                seconds = self._duration(role_of(name), "load", self.spec["load"])
                self.work[member] = self._work("load", start, seconds, self._num_ticks(role_of(name), "load"))
        return self._watch_until_done()

    def _run_stage(self, stage: str, medians: dict[str, float], now: float, planned: tuple[str, str] | None) -> float:
        while True:
            self.stage = stage
            self._begin(stage, medians, now)
            if planned is not None:
                self._put_hang(planned[0], stage, medians)
                planned = None
            now = self._watch_until_done()
            if self.hang is None or now >= self.ends:
                return now
            # The group that hung was restarted: it loads, and the stage is done again.
            hung, self.hang = self.hang.member[0], None
            now = self._load([hung], now)
            if now >= self.ends:
                return now

    def _begin(self, stage: str, medians: dict[str, float], now: float) -> None:
        shared: Work | None = None
        for role, median in medians.items():
            members = [member for member in self.members if role_of(member[0]) == role]
            seconds = self._duration(role, stage, median)
            count = self._num_ticks("sync" if stage == "sync" else role, stage)
            if stage in COLLECTIVE:
                together = members if stage != "sync" else self.members
                if shared is None or stage != "sync":
                    shared = self._work(stage, now, seconds * self._slowed(together, now), count)
                for member in members:
                    self.work[member] = Work(stage, list(shared.ticks), shared.end)
            else:
                for member in members:
                    own = seconds * self._lognormal(1.0, self.spec["member_sigma"]) * self._slowed([member], now)
                    self.work[member] = self._work(stage, now, own, count)

    def _put_hang(self, role: str, stage: str, medians: dict[str, float]) -> None:
        """From a random moment of one member's part on it does nothing, and whoever waits for it neither."""
        allowed = ALLOWED * stage_quantile(self.spec, medians[role])
        member = self.random.choice([one for one in self.members if role_of(one[0]) == role])
        work = self.work[member]
        at = self.random.uniform(min(work.ticks[0], work.end), work.end)
        if at + allowed > self.ends:
            return  # too late to tell whether it is found in time
        self.hang = Hang(member, stage, at, self.random.random() < self.spec["hangs"]["share_stopped"], allowed)
        waiting = [member]
        if stage == "sync":
            waiting = list(self.work)
        elif stage in COLLECTIVE:
            waiting = [one for one in self.work if one[0] == member[0]]
        for one in waiting:
            ticks = self.work[one].ticks
            # The others of a collective still do what needs nothing from it: one more tick.
            kept = bisect_right(ticks, at) + (0 if one == member else 1)
            self.work[one] = Work(stage, ticks[:kept], math.inf)

    # ---- the watcher ---------------------------------------------------------------------------------------------

    def _watch_until_done(self) -> float:
        """Look until every member is idle, or what hangs was restarted; returns when that was."""
        ended = max(work.end for work in self.work.values())
        for now in self._look_times(min(ended, self.ends)):
            gone = [self._carry_out(decision, now) for decision in self._look(now)]
            if any(gone):
                ended = now
                break
        for member in self.work:
            self.done[member] = self._seen(member, ended)[1]
        self.work = {}
        return ended

    def _look_times(self, until: float) -> Iterator[float]:
        """The watcher's times before ``until``, leaving out those between two changes but the last before each."""
        ticks = {time for work in self.work.values() for time in (*work.ticks, work.end)}
        changes = sorted(ticks - {math.inf})
        last = math.ceil(until / self.interval) - 1
        while self.look_number < last:
            now = self.look_number * self.interval
            index = bisect_right(changes, now)
            change = changes[index] if index < len(changes) else math.inf
            change = min(change, *(_next_edge(gaps, now) for gaps in self.unseen))
            after = math.ceil(min(change, until) / self.interval)
            number = max(after - 1, self.look_number + 1)
            if self.hang is not None:  # there is no change to wait for
                number = min(number, self.look_number + 1 + max(0, int((now - self.hang.at) / 100 / self.interval)))
            self.look_number = min(number, last)
            yield self.look_number * self.interval

    def _look(self, now: float) -> list[Decision]:
        self.result.looks += 1
        blind = _within(self.blackouts, now)
        stopped = self.hang.member if self.hang and self.hang.stopped and now >= self.hang.at else None
        groups = []
        for name, size in self.spec["groups"].items():
            seen = []
            for rank in range(size):
                member = (name, rank)
                if blind or member == stopped or _within(self.silences[member], now):
                    seen.append(MemberSeen(rank, answered=False))
                else:
                    stage, progress = self._seen(member, now)
                    seen.append(MemberSeen(rank, True, stage, progress, 1, "n1"))
            groups.append(GroupSeen(name, role_of(name), self.generations[name], size, tuple(seen)))
        ray = RayState(problems=("no answer",)) if _within(self.api_gaps, now) else self._ray_state()
        observation = Observation(now, RUN, self.step, self.stage, tuple(groups), ray)
        self.history = learn(self.history, observation)
        self._note_closest(observation)
        return decide(observation, self.policy, self.history, now)

    def _note_closest(self, observation: Observation) -> None:
        """How near a healthy member ever came to its limit, from half the floor on."""
        for group in observation.groups if self.hang is None else ():
            for member in group.members:
                track = self.history.tracks[group.name, member.rank]
                quiet = observation.time - track.since
                if member.answered and track.stage != IDLE and 2 * quiet > self.policy.floor:
                    limit = stage_limit(group.role, track, self.history, self.policy)
                    text = f"{group.role} {track.stage}: {quiet:.0f} of {limit.seconds:.0f} s; {limit.why}"
                    self.result.closest = max(self.result.closest, (round(quiet / limit.seconds, 3), text))

    def _seen(self, member: Member, now: float) -> tuple[str, int]:
        work = self.work.get(member)
        if work is None:
            return IDLE, self.done[member]
        return work.stage if now < work.end else IDLE, self.done[member] + bisect_right(work.ticks, now)

    def _ray_state(self) -> RayState:
        actors = tuple(
            ActorSeen(actor_name(RUN, name, self.generations[name], rank), "ALIVE", 1, "n1")
            for name, rank in self.members
        )
        return RayState(actors, (NodeSeen("n1", "10.0.0.1", True),), ())

    def _carry_out(self, decision: Decision, now: float) -> bool:
        """Restart what was decided; True if what hangs is gone."""
        self.history = remember(self.history, decision, now)
        if decision.action == "report":
            self._reported(decision, now)
            return False
        self.generations[decision.group] += 1
        if self.hang is not None and decision.group == self.hang.member[0]:
            self._found(self.hang, now, decision.reason)
            return True
        self.result.healthy_restarts.append(f"{now / 3600:.2f} h, step {self.step}: {decision.reason}")
        for member in [one for one in self.members if one[0] == decision.group]:  # it comes back and waits
            self.done[member] = 0
            self.work[member] = Work("load", [], now)
        return False

    def _found(self, hang: Hang, now: float, reason: str) -> None:
        self.result.hangs.append(
            {
                "stage": hang.stage,
                "role": role_of(hang.member[0]),
                "seconds": now - hang.at,
                "allowed": hang.allowed_seconds,
                "step": self.step,
                "hour": round(hang.at / 3600, 2),
                "stopped": hang.stopped,
                "reason": reason,
            }
        )

    def _reported(self, decision: Decision, now: float) -> None:
        hours = now / 3600 - self.spec["stragglers"]["from_hour"]
        if self.slow and decision.reason.startswith(f"rank {self.slow[0][1]} of {self.slow[0][0]} ") and hours >= 0:
            self.result.found_after_hours = hours
        else:
            self.result.reports[decision.reason] += 1


def _within(gaps: list[tuple[float, float]], now: float) -> bool:
    index = bisect_right(gaps, (now, math.inf)) - 1
    return index >= 0 and now < gaps[index][1]


def _next_edge(gaps: list[tuple[float, float]], now: float) -> float:
    """When the watcher next begins or ceases to see."""
    index = bisect_right(gaps, (now, math.inf)) - 1
    if index >= 0 and now < gaps[index][1]:
        return gaps[index][1]
    return gaps[index + 1][0] if index + 1 < len(gaps) else math.inf


def stage_quantile(spec: dict[str, Any], median: float) -> float:
    """P99.9 of a stage's time: lognormal, with the slow share (first times are not part of it)."""

    def above(seconds: float) -> float:
        def tail(middle: float) -> float:
            return 0.5 * math.erfc(math.log(seconds / middle) / spec["sigma"] / math.sqrt(2))

        slow = spec["slow_share"]
        return (1 - slow) * tail(median) + slow * tail(median * spec["slow_factor"])

    low, high = median, median * 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if above(middle) > 1 - QUANTILE else (low, middle)
    return high


def simulate(job: tuple[dict[str, Any], str, int, float]) -> Result:
    return Simulation(*job).run()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The report; also printed as JSON."""
    spec = yaml.safe_load(DISTRIBUTIONS.read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=spec["runs"])
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first run; a run's draws follow from its number"
    )
    parser.add_argument("--hours", type=float, default=spec["hours"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--mode", choices=("healthy", "hangs", "stragglers"), action="append")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    report: dict[str, Any] = {"runs": options.runs, "hours_each": options.hours, "policy": Recovery().model_dump()}
    for mode in options.mode or ["healthy", "hangs", "stragglers"]:
        jobs = [(spec, mode, number, options.hours) for number in range(options.first, options.first + options.runs)]
        if options.processes > 1:
            with multiprocessing.Pool(options.processes) as pool:
                results = pool.map(simulate, jobs, chunksize=1)
        else:
            results = [simulate(job) for job in jobs]
        report[mode] = summary(results, spec)
        print(f"{mode}: {time.monotonic() - began:.0f} s", json.dumps(report[mode]), file=sys.stderr)
    report["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(report, indent=2))
    return report


def summary(results: list[Result], spec: dict[str, Any]) -> dict[str, Any]:
    restarts = [text for result in results for text in result.healthy_restarts]
    report: dict[str, Any] = {
        "steps": sum(result.steps for result in results),
        "looks": sum(result.looks for result in results),
        "healthy_restarts": len(restarts),
        "healthy_restarts_shown": restarts[:10],
        "closest_to_a_limit": sorted((result.closest for result in results), reverse=True)[:5],
        "healthy_reported_slow": sum(len(result.reports) for result in results),
    }
    hangs = [hang for result in results for hang in result.hangs]
    if hangs:
        in_time = [hang for hang in hangs if hang["seconds"] <= hang["allowed"]]
        report["hangs"] = len(hangs)
        report["share_found_in_time"] = round(len(in_time) / len(hangs), 4)
        report["median_seconds_to_find"] = {}
        for stage in spec["stages"]:
            seconds = sorted(hang["seconds"] for hang in hangs if hang["stage"] == stage)
            if seconds:
                report["median_seconds_to_find"][stage] = round(seconds[len(seconds) // 2], 1)
        late = [hang for hang in hangs if hang["seconds"] > hang["allowed"]]
        report["late_shown"] = late[:10]
    with_straggler = [result for result in results if result.straggler]
    if with_straggler:
        report["stragglers"] = {}
        for kind in sorted({result.straggler for result in with_straggler}):
            of_kind = [result for result in with_straggler if result.straggler == kind]
            hours = sorted(one.found_after_hours for one in of_kind if one.found_after_hours is not None)
            report["stragglers"][kind] = {
                "put_in": len(of_kind),
                "found": len(hours),
                "median_hours": round(hours[len(hours) // 2], 2) if hours else None,
            }
    return report


if __name__ == "__main__":
    main()
