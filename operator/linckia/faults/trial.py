"""One fault in a live run: wait for its moment, strike, wait until it is healed. What it sees and does is handed in."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from linckia.api.errors import UserError
from linckia.faults.aim import stands
from linckia.faults.inject import Aim, Fault

View = Mapping[str, Any]
Look = Callable[[], View | None]
Find = Callable[[View], Aim | None]
LOOK_SECONDS = 0.01
SILENT_SECONDS = 30.0  # without an answer: a busy controller is silent for less, one that has ended for ever


@dataclass(frozen=True)
class Moment:
    """When to strike: in this stage, at this step or a later one. None: any."""

    stage: str | None = None
    step: int | None = None

    def is_in(self, view: View) -> bool:
        return (self.stage is None or view.get("stage") == self.stage) and view.get("step", 0) >= (self.step or 0)


@dataclass(frozen=True)
class Witness:
    """That the fault really struck: what, and where the run stood right before and after. ``time``: since 1970."""

    target: str
    pid: int
    start_time: int | None
    generation: int
    attempt: int
    time: float
    step: int
    stage: str
    step_after: int | None
    stage_after: str | None


@dataclass
class Clock:
    """Where the seconds come from, and how they are waited for."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = field(default=time.sleep)


def await_moment(look: Look, find: Find, target: str, moment: Moment, limit: float, clock: Clock) -> tuple[View, Aim]:
    """The view at the moment, and what ``find`` says the target is then. UserError if the run ends or ``limit`` seconds pass first."""
    words = f"step {moment.step or 0}, stage {moment.stage or 'any'}"
    for view, _, silent in looks(look, limit, clock):
        if view is not None:
            if moment.is_in(view) and (aim := find(view)) is not None:
                return view, aim
        elif silent:
            raise UserError("RUN", None, f"it ended before it came to {words}", "start it again, or strike earlier")
    raise UserError("--timeout", limit, f"{target} was not seen at {words} in that time", "give it longer")


def looks(look: Look, limit: float, clock: Clock) -> Iterator[tuple[View | None, float, bool]]:
    """Look again and again for ``limit`` seconds: the view, when one was last seen, and whether that is too long ago."""
    deadline = clock.now() + limit
    seen = clock.now()
    while clock.now() < deadline:
        view = look()
        now = clock.now()
        seen = seen if view is None else now
        yield view, seen, now - seen > SILENT_SECONDS
        clock.sleep(LOOK_SECONDS)


def strike(look: Look, fault: Fault, view: View, aim: Aim, clock: Clock) -> Witness:
    """Let the fault strike. UserError if what it aims at is gone; then nothing was struck."""
    struck = clock.now()
    fault.strike(aim)
    after = look() or {}
    return Witness(
        target=f"{aim.group}/{aim.rank}",
        pid=aim.pid,
        start_time=aim.started,
        generation=aim.generation,
        attempt=view.get("attempt", 0),
        time=struck,
        step=view.get("step", 0),
        stage=view.get("stage", ""),
        step_after=after.get("step"),
        stage_after=after.get("stage"),
    )


def await_healed(look: Look, fault: Fault, witness: Witness, limit: float, clock: Clock) -> float | None:
    """When the run was seen whole again, in seconds since 1970; None if it was not within ``limit`` seconds, or has ended."""
    for view, seen, silent in looks(look, limit, clock):
        if view is not None:
            if is_healed(view, fault, witness):
                return seen
        elif fault.healed_by != "next attempt" and silent:
            return None
    return None


def is_healed(view: View, fault: Fault, witness: Witness) -> bool:
    """Whether a view shows the run whole and at work after the fault. Pure."""
    group = witness.target.rpartition("/")[0]
    if fault.healed_by == "next attempt":
        return view.get("attempt", 0) > witness.attempt and view.get("stage") not in ("start", "recover")
    if fault.healed_by == "itself":
        return stands(view, group, witness.generation - 1) and view.get("step", 0) > witness.step
    return stands(view, group, witness.generation)


def disagreements(view: View, log_hash: Callable[[int], str | None]) -> list[str]:
    """Where members of trained groups stand otherwise than the log says; [] if all agree.

    ``log_hash``: the log's hash after a step, None if it cannot say. What is being updated right now is no disagreement:
    look again.
    """
    problems = []
    for name, group in view.get("groups", {}).items():
        at = {(one["applied_step"], one["log_hash"]) for one in group.get("members", []) if one.get("log_hash")}
        if len(at) > 1:
            problems.append(f"the ranks of {name} stand at steps {sorted(step for step, _ in at)}")
        for step, found in at:
            wanted = log_hash(step)
            if wanted is not None and wanted != found:
                problems.append(
                    f"{name} stands at step {step} of another history: {found[:12]}, the log has {wanted[:12]}"
                )
    return problems


def await_agreement(look: Look, log_hash: Callable[[int], str | None], limit: float, clock: Clock) -> list[str]:
    """``disagreements`` of the first view that has none, or of the last one within ``limit`` seconds."""
    deadline = clock.now() + limit
    problems = ["the run does not answer"]
    while clock.now() < deadline:
        if (view := look()) is not None and not (problems := disagreements(view, log_hash)):
            return []
        clock.sleep(10 * LOOK_SECONDS)
    return problems
