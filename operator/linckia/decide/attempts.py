"""Whether a run whose RayJob has ended gets another: a child RayJob, only where no layer below heals. Pure.

Below the operator the supervisor starts a controller again, and KubeRay submits a job again whose head lost its memory. What
is left is a job that has ended for good though nobody wanted it to: mostly a head that was lost while Redis kept its memory.
Unknown is never dead: as long as one witness has not answered, nothing is stopped and nothing is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from linckia.decide.budget import back_off
from linckia.observe.kubernetes import RayJobSeen

Life = Literal["alive", "gone", "unknown"]

CHILDREN_PER_STEP = 3  # as many are kept, so their number can always be counted
FIRST_WAIT_SECONDS = 10.0
SETTLE_SECONDS = 15.0  # so long nobody has been seen before anything is done about it

# Exit codes with which `linckia train --supervise` leaves the next start to a person: (CamelCase reason, words).
ENDED_FOR_A_PERSON = {
    2: ("UserError", "something in the run's config or surroundings has to be put right; the job's log says what"),
    3: ("CrashLoop", "it would fail again the same way; the job's log says what a person has to correct"),
    4: ("Replaced", "a newer attempt of this run was started elsewhere"),
    130: ("Interrupted", "it was interrupted"),
}


@dataclass(frozen=True)
class Evidence:
    """All that speaks for or against a living controller.

    ``latest``: the newest RayJob of the run, ``children`` those that the operator has made, oldest first. ``beacon``,
    ``supervisor`` (the actor of Ray's job) and ``control`` (the API) each are alive, gone or unknown. ``ray_job``: Ray's job
    in its own job API, unknown also while it was not asked. ``stop_taken``: Ray's job API has taken the order to stop it.
    ``gone_since``: seconds since 1970, when nobody alive was seen for the first time in a row. ``step``: the run's.
    """

    root: RayJobSeen
    latest: RayJobSeen
    children: Sequence[RayJobSeen] = ()
    beacon: Life = "unknown"
    supervisor: Life = "unknown"
    control: Life = "unknown"
    ray_job: Life = "unknown"
    stop_taken: bool = False
    gone_since: float | None = None
    step: int = 0


@dataclass(frozen=True)
class Verdict:
    """``action``: none; stop Ray's job; create the ``number``-th child; the run is over.

    ``reason`` is CamelCase, for programs; ``words`` for a person. ``phase`` only when it is over.
    """

    action: Literal["none", "stop", "create", "over"]
    reason: str
    words: str = ""
    number: int = 0
    phase: Literal["Succeeded", "Stopped", "Failed"] | None = None


def next_attempt(evidence: Evidence, now: float) -> Verdict:
    """What follows from the evidence; ``now`` in seconds since 1970."""
    root, latest = evidence.root, evidence.latest
    if (over := ended(latest)) is not None:
        return over
    if "alive" in (evidence.beacon, evidence.control):
        if latest.terminal:
            return Verdict("none", "Detached", f"RayJob {latest.name} says it has ended, but its controller lives")
        return Verdict("none", "ControllerLives")
    if evidence.supervisor == "alive":
        return Verdict("none", "SupervisorLives", "the job's supervisor starts the controller")
    if not root.selects:
        return Verdict("none", "KubeRayHeals", "KubeRay starts a self-contained RayJob again, up to its backoffLimit")
    if root.deleting or latest.deleting:
        return Verdict("none", "Deleting", f"RayJob {latest.name} is being deleted")
    if latest.job_id is None and not latest.terminal:
        return Verdict("none", "NotSubmitted", "KubeRay has not submitted the job yet")
    if unknown := _unknown(evidence):
        return Verdict("none", "Frozen", f"{unknown} cannot be seen; nothing is decided until it can")
    if evidence.gone_since is None or now - evidence.gone_since < SETTLE_SECONDS:
        return Verdict("none", "Settling", "no controller is seen; it may be starting")
    return _nobody_trains(evidence, now)


def ended(job: RayJobSeen) -> Verdict | None:
    """The run is over as this RayJob, its newest, tells; None if it is not."""
    if job.job_status == "SUCCEEDED":
        return Verdict("over", "Finished", phase="Succeeded")
    if job.job_status == "STOPPED":
        return Verdict("over", "JobStopped", "the Ray job was stopped; apply the RayJob anew to go on", phase="Stopped")
    if job.exit_code in ENDED_FOR_A_PERSON and job.terminal:
        reason, words = ENDED_FOR_A_PERSON[job.exit_code]
        phase: Literal["Stopped", "Failed"] = "Stopped" if reason == "Interrupted" else "Failed"
        return Verdict("over", reason, f"RayJob {job.name} ended with exit code {job.exit_code}: {words}", phase=phase)
    if job.terminal and job.reason == "DeadlineExceeded":
        words = f"RayJob {job.name} has used up its activeDeadlineSeconds"
        return Verdict("over", "DeadlineExceeded", words, phase="Failed")
    if job.deployment_status == "Failed" and not job.selects:
        return Verdict(
            "over", "RetriesUsedUp", f"RayJob {job.name} failed ({job.reason or 'no reason'})", phase="Failed"
        )
    return None


def _unknown(evidence: Evidence) -> str:
    lives = {
        "the run's beacon (the Ray state API)": evidence.beacon,
        "the job's supervisor (the Ray state API)": evidence.supervisor,
        "the control API": evidence.control,
    }
    return " and ".join(what for what, life in lives.items() if life == "unknown")


def _nobody_trains(evidence: Evidence, now: float) -> Verdict:
    """Beacon and supervisor are gone and the control API is silent, all for a while."""
    latest = evidence.latest
    if latest.job_id is not None:
        if not evidence.stop_taken:
            return Verdict(
                "stop", "StoppingRayJob", f"Ray is told to stop job {latest.job_id}, whose controller is gone"
            )
        if evidence.ray_job == "unknown":
            return Verdict("none", "Frozen", "Ray's job API does not say whether the old job has ended")
        if evidence.ray_job == "alive":
            return Verdict("none", "RayJobEnding", f"Ray has not ended job {latest.job_id} yet")
    if not latest.terminal:
        return Verdict("none", "RayJobTurning", f"KubeRay starts RayJob {latest.name} again, or sees that it has ended")
    here = children_at(evidence.children, evidence.step)
    if len(here) >= CHILDREN_PER_STEP:
        return Verdict(
            "over", "TooManyAttempts",
            f"{len(here)} RayJobs in a row came to nothing at step {evidence.step}; find out what ends them, then apply the "
            f"RayJob anew: the run goes on from there",
            phase="Failed",
        )  # fmt: skip
    since = now - max((child.created for child in here), default=now)
    wait = back_off(len(here), since, FIRST_WAIT_SECONDS)
    if wait > 0:
        return Verdict("none", "BackingOff", f"RayJob {latest.name} has ended; the next is made after a wait")
    number = 1 + max((child_number(child) for child in evidence.children), default=0)
    return Verdict("create", "NewAttempt", f"RayJob {latest.name} has ended and its controller is gone", number=number)


def children_at(children: Sequence[RayJobSeen], step: int) -> list[RayJobSeen]:
    """The newest children that were all made at one step of the run: what they were made for has not moved since."""
    found: list[RayJobSeen] = []
    for child in reversed(children):
        if child.at_step != step:
            break
        found.append(child)
    return found


def child_number(child: RayJobSeen) -> int:
    """The number at the end of a child's name; 0 for a name that is none of ours."""
    _, _, number = child.name.rpartition("-attempt-")
    return int(number) if number.isascii() and number.isdigit() else 0


def superfluous(children: Sequence[RayJobSeen], kept: int) -> list[RayJobSeen]:
    """The children to delete: ended ones that ``kept`` newer ones have followed."""
    return [child for child in children[:-kept] if child.terminal]


@dataclass(frozen=True)
class Chain:
    """A root RayJob with the children that the operator has made of it, oldest first."""

    root: RayJobSeen
    children: tuple[RayJobSeen, ...] = ()

    @property
    def latest(self) -> RayJobSeen:
        return self.children[-1] if self.children else self.root


def chains(jobs: Sequence[RayJobSeen]) -> list[Chain]:
    """The RayJobs of one run, in the order of their claim to it: who is not over before who is, then the older.

    The first has the run. A RayJob that is over claims nothing: whoever applies another with the same label goes on.
    """
    roots = [job for job in jobs if job.attempt_of is None]
    found = [
        Chain(root, tuple(sorted((job for job in jobs if job.attempt_of == root.name), key=child_number)))
        for root in roots
    ]

    def claim(chain: Chain) -> tuple[bool, float, str]:
        over = chain.root.deleting or ended(chain.latest) is not None
        return over, -chain.root.created if over else chain.root.created, chain.root.name

    return sorted(found, key=claim)
