"""The status of a TrainingRun from what was seen of the run. Pure: it can be made again at any time.

Of the status before, only this is taken: when a condition last changed, and what nobody answers for any more (how far the
run had come when its controller was last heard).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from linckia.api.kubernetes import (
    COMPLETE,
    DETACHED,
    FAILED,
    MISCONFIGURED,
    PROGRESSING,
    REACHABLE,
    READY,
)
from linckia.api.names import role_of
from linckia.api.training_run import Condition, GroupStatus, Phase, Recoveries, RecoveryStatus, TrainingRunStatus
from linckia.decide.attempts import Verdict
from linckia.decide.notes import Note
from linckia.observe.control_api import NOBODY, ControlSeen
from linckia.observe.kubernetes import RayJobSeen, timestamp

SHOWN_RECOVERIES = 5
SHOWN_WARNINGS = 5
WARNING_LENGTH = 300


@dataclass(frozen=True)
class Facts:
    """What the status is made of. ``ray_answers``: the Ray state API did, None if there is no head to ask.

    ``verdict``: what is done about the run's RayJob. ``attempts_made``: children so far. ``before``: the status so far.
    """

    job: RayJobSeen
    verdict: Verdict
    control: ControlSeen = NOBODY
    ray_answers: bool | None = None
    notes: Sequence[Note] = ()
    attempts_made: int = 0
    before: TrainingRunStatus = field(default_factory=TrainingRunStatus)


def run_status(facts: Facts, now: float) -> TrainingRunStatus:
    """The whole status. ``now``: seconds since 1970, used only for conditions that change."""
    view = facts.control.view
    known = _from_view(view) if view else _kept(facts.before)
    phase = run_phase(facts)
    if phase == "Succeeded" and known.get("steps") is not None:
        known |= {"step": known["steps"], "progress": "100%", "seconds_left": 0}
    if phase in ("Succeeded", "Stopped", "Failed"):
        known |= {"stage": None, "seconds_left": 0 if phase == "Succeeded" else None}
    groups: tuple[GroupStatus, ...] = known.get("groups", ())
    message = _message(facts, phase, known)
    return TrainingRunStatus(
        **known,
        phase=phase,
        message=message,
        ray_cluster=facts.job.cluster,
        ray_job=facts.job.name,
        groups_ready=f"{sum(group.ready for group in groups)}/{len(groups)}" if groups else None,
        attempts_made=facts.attempts_made,
        conditions=_conditions(facts, phase, groups, message, now),
    )


def run_phase(facts: Facts) -> Phase:
    """One word for where the run stands."""
    view, verdict, before = facts.control.view, facts.verdict, facts.before
    if view:
        if any(group.get("returning") for group in _groups(view).values()):
            return "Recovering"
        if not view.get("groups"):
            return "Recovering" if (view.get("attempt") or 1) > 1 else "Starting"
        return "Running"
    if verdict.phase is not None:
        return "Stopped" if verdict.phase == "Succeeded" and was_stopped(before) else verdict.phase
    ran = before.attempt is not None
    if facts.ray_answers is not True:
        return "Unknown" if ran else "Pending"
    if verdict.reason in ("ControllerLives", "Detached", "Frozen"):
        return "Unknown" if ran else "Starting"  # it is listed, and does not answer
    if verdict.reason == "NotSubmitted":
        return "Recovering" if ran else "Pending"
    return "Recovering" if ran else "Starting"


STOPPING = "Stopping"  # reason of the condition Progressing


def was_stopped(before: TrainingRunStatus) -> bool:
    """Whether the run that has ended well was told to stop: its controller said so while it answered."""
    return before.phase == "Stopped" or any(one.reason == STOPPING for one in before.conditions)


def _from_view(view: Mapping[str, Any]) -> dict[str, Any]:
    step, steps = view.get("step"), view.get("steps")
    done = view.get("log_head", step)
    return {
        "run_directory": view.get("uri"),
        "attempt": view.get("attempt"),
        "step": step,
        "steps": steps,
        "progress": f"{100 * done // steps}%" if isinstance(done, int) and isinstance(steps, int) and steps else None,
        "stage": view.get("stage"),
        "seconds_left": _rounded(view.get("seconds_left")),
        "held_out_score": view.get("held_out_score"),
        "groups": tuple(_group(name, group, view) for name, group in _groups(view).items()),
        "recoveries": _recoveries(view),
        "last_checkpoint": view.get("last_checkpoint") or None,
        "warnings": tuple(str(one)[:WARNING_LENGTH] for one in (view.get("warnings") or ())[-SHOWN_WARNINGS:]),
    }


def _kept(before: TrainingRunStatus) -> dict[str, Any]:
    """How far the run had come when it was last heard; of its groups nothing is known now."""
    kept = (
        "run_directory",
        "attempt",
        "step",
        "steps",
        "progress",
        "held_out_score",
        "recoveries",
        "last_checkpoint",
        "warnings",
    )
    return {name: getattr(before, name) for name in kept}


def _groups(view: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    found = view.get("groups")
    return found if isinstance(found, Mapping) else {}


def _group(name: str, group: Mapping[str, Any], view: Mapping[str, Any]) -> GroupStatus:
    heard = ((view.get("heard") or {}).get("groups") or {}).get(name, {})
    members = heard.get("members") or group.get("members") or []
    version = [one.get("weight_version") for one in group.get("members") or [] if one and one.get("weight_version")]
    return GroupStatus(
        name=name,
        role=role_of(name),
        generation=group.get("generation", 0),
        members=len(members),
        answering=sum(one is not None for one in members),
        ready=not group.get("returning"),
        standbys=group.get("standbys", 0),
        restarts_left=group.get("restarts_left"),
        weight_version=str(version[0][0] if isinstance(version[0], list) else version[0]) if version else None,
    )


def _recoveries(view: Mapping[str, Any]) -> Recoveries:
    rows = view.get("recoveries") or []
    return Recoveries(
        total=view.get("recoveries_total", len(rows)),
        lost_seconds=round(view.get("recoveries_seconds", sum(row.get("seconds_total", 0.0) for row in rows)), 1),
        last=tuple(
            RecoveryStatus(
                group=row["group"],
                generation=row["generation"],
                step=row["step"],
                stage=row["stage"],
                cause=str(row["cause"])[:WARNING_LENGTH],
                time=timestamp(row["time"]),
                seconds=round(row["seconds_total"], 1),
            )
            for row in rows[-SHOWN_RECOVERIES:]
        ),
    )


def _rounded(seconds: float | None) -> int | None:
    """To a person's precision, so that the status does not change with every look: 10 s, from ten minutes on a minute."""
    if seconds is None:
        return None
    unit = 10 if seconds < 600 else 60
    return int(round(seconds / unit) * unit)


def _message(facts: Facts, phase: Phase, known: Mapping[str, Any]) -> str:
    """The one thing to know now: what has to be put right, what is waited for, or where it stands."""
    wrong = [note.words for note in facts.notes if note.misconfigured]
    if wrong:
        return wrong[0]
    step = f"step {known['step']} of {known['steps']}" if known.get("steps") else ""
    if facts.control.view:
        coming = [name for name, group in _groups(facts.control.view).items() if group.get("returning")]
        if facts.control.view.get("stopping"):
            return f"{step}, then it stops, as it was told to"
        return f"{step}, {', '.join(coming)} is being replaced" if coming else step
    if phase == "Stopped" and facts.verdict.phase == "Succeeded":
        return f"stopped at {step}; apply the RayJob anew to go on"
    if facts.verdict.words:
        return facts.verdict.words
    said = [note.words for note in facts.notes]
    if said and phase in ("Pending", "Starting", "Unknown"):
        return said[0]
    if phase == "Unknown":
        return facts.control.problem or "the Ray head does not answer"
    return {"Pending": "the RayCluster has no head yet", "Starting": "the controller starts"}.get(phase, step)


def _conditions(
    facts: Facts, phase: Phase, groups: Sequence[GroupStatus], message: str, now: float
) -> tuple[Condition, ...]:
    over = phase in ("Succeeded", "Stopped", "Failed")
    answers = bool(facts.control.view)
    waiting = ", ".join(group.name for group in groups if not group.ready)
    wrong = [note for note in facts.notes if note.misconfigured]
    detached = facts.verdict.words if facts.verdict.reason == "Detached" else ""
    failed = phase == "Failed"
    stopping = bool(facts.control.view.get("stopping"))
    unclear = "Unknown" if phase == "Unknown" else "False"
    found = [
        (READY, *_ready(phase, waiting, unclear)),
        (PROGRESSING, "True" if phase == "Running" else unclear, STOPPING if stopping else phase, ""),
        (REACHABLE, *_reachable(facts, over, answers)),
        (DETACHED, _is(bool(detached)), "JobEndedFirst" if detached else "Attached", detached),
        (MISCONFIGURED, _is(bool(wrong)), *((wrong[0].reason, wrong[0].words) if wrong else ("AsExpected", ""))),
        (COMPLETE, _is(phase in ("Succeeded", "Stopped")), phase, message if over and not failed else ""),
        (FAILED, _is(failed), facts.verdict.reason if failed else phase, message if failed else ""),
    ]
    before = {one.type: one for one in facts.before.conditions}
    return tuple(_condition(before.get(row[0]), row, now) for row in found)


def _is(true: bool) -> str:
    return "True" if true else "False"


def _ready(phase: Phase, waiting: str, unclear: str) -> tuple[str, str, str]:
    if phase == "Running":
        return "True", "AllGroupsStand", ""
    if waiting:
        return "False", "GroupsReturning", f"being replaced: {waiting}"
    return unclear, phase, ""


def _reachable(facts: Facts, over: bool, answers: bool) -> tuple[str, str, str]:
    if answers:
        return "True", "Answers", ""
    if over:
        return "False", "RunOver", ""
    words = {
        "silent": "NoAnswer", "refused": "TokenRefused", "stranger": "NotBelieved", "version": "UnknownApiVersion",
        "damaged": "NoView",
    }  # fmt: skip
    if facts.ray_answers is not True:
        return (
            "Unknown",
            "HeadDoesNotAnswer",
            "where the controller listens is in the Ray state API, which does not answer",
        )
    return "False", words.get(facts.control.outcome, "NoAnswer"), facts.control.problem


def _condition(before: Condition | None, row: tuple[str, str, str, str], now: float) -> Condition:
    kind, status, reason, message = row
    since = before.last_transition_time if before is not None and before.status == status else timestamp(now)
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=since)  # type: ignore[arg-type]
