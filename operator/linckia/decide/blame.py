"""Who is to blame where several wait for one: in a weight transfer between groups, in a collective between ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from linckia.decide.history import TRANSFER_STAGES, History
from linckia.decide.limits import Limit, WatchPolicy
from linckia.observe.observation import GroupSeen

TRANSFER_OWNER = "policy"
TRANSFER_ROLES = ("policy", "rollout")


@dataclass(frozen=True)
class Suspect:
    """A member that shows no progress: for ``quiet`` seconds, of which it has not answered for the last ``silent``."""

    group: GroupSeen
    rank: int
    stage: str
    progress: int
    quiet: float
    silent: float
    limit: Limit
    why_blamed: str = ""


def to_blame(
    suspects: Sequence[Suspect], groups: Sequence[GroupSeen], history: History, policy: WatchPolicy
) -> Iterator[Suspect]:
    """One suspect for each group that is to be restarted: of a transfer only those that the others wait for."""
    for group in groups:
        own = [one for one in suspects if one.group.name == group.name and one.stage not in TRANSFER_STAGES]
        if own:
            yield _worst(own)
    transfer = [one for one in suspects if one.stage in TRANSFER_STAGES and not _restarting(one.group, history)]
    # A restart has just been decided: whoever waited for that group gets its whole time again.
    late = [one for one in transfer if one.quiet > one.limit.seconds + _excused(one, history)]
    if late:
        yield from _blamed_in_transfer(late, groups, history, policy)


def _restarting(group: GroupSeen, history: History) -> bool:
    decided = history.decided.get(group.name)
    return decided is not None and decided.generation == group.generation and "restart" in decided.actions


def _excused(suspect: Suspect, history: History) -> float:
    """Seconds of a suspect's quiet time that lie before the last restart."""
    if history.last_restart is None:
        return 0.0
    since = history.tracks[suspect.group.name, suspect.rank].since
    return max(0.0, history.last_restart - since)


def _worst(suspects: Sequence[Suspect]) -> Suspect:
    """Of one group's members: one that does not answer, else the one that is behind the others."""
    silent = max(suspects, key=lambda one: one.silent)
    if silent.silent:
        return silent
    behind = min(suspects, key=lambda one: one.progress)
    ahead = max(one.progress for one in suspects)
    return replace(behind, why_blamed=f"others are at {ahead}") if behind.progress < ahead else behind


def _blamed_in_transfer(
    late: Sequence[Suspect], groups: Sequence[GroupSeen], history: History, policy: WatchPolicy
) -> Iterator[Suspect]:
    """Those that do not answer; else an engine behind the other engines, or one alone behind the policy; else the policy."""
    everybody = list(_in_transfer(groups, history, late[0], policy))
    silent = [one for one in everybody if one.silent > policy.floor]
    if silent:
        for name in dict.fromkeys(one.group.name for one in silent):
            worst = _worst([one for one in silent if one.group.name == name])
            yield replace(worst, why_blamed="the others of the transfer wait for it")
        return
    done = _done(everybody, history)
    names = _behind(done) or [name for name in done if name == TRANSFER_OWNER] or list(done)
    for name in names:
        own, most = done[name], max((amount for amount in done.values() if amount is not None), default=None)
        why = "" if own is None or own == most else f"it has done {own} of the transfer, others {most}"
        yield replace(_worst([one for one in everybody if one.group.name == name]), why_blamed=why)


def _behind(done: dict[str, int | None]) -> list[str]:
    """The engines that have got less than the others; none where that cannot be told."""
    engines = {name: amount for name, amount in done.items() if name != TRANSFER_OWNER}
    compared = list(done.values() if len(engines) == 1 else engines.values())
    known = [amount for amount in compared if amount is not None]
    if len(known) < len(compared) or not engines:
        return []
    return [name for name, amount in engines.items() if amount is not None and amount < max(known)]


def _in_transfer(
    groups: Sequence[GroupSeen], history: History, late: Suspect, policy: WatchPolicy
) -> Iterator[Suspect]:
    """Every member of the transfer, late by its own limit or not; so is one that has stopped answering before it was seen
    to begin. Groups whose restart was decided are not waited for any more."""
    time = late.quiet + history.tracks[late.group.name, late.rank].since
    for group in groups:
        if group.role not in TRANSFER_ROLES or _restarting(group, history):
            continue
        for member in group.members:
            track = history.tracks.get((group.name, member.rank))
            if track is None:
                continue
            silent = 0.0 if member.answered else time - track.answered
            if track.stage in TRANSFER_STAGES or silent > policy.floor:
                quiet = time - track.since
                yield Suspect(group, member.rank, track.stage, track.progress, quiet, silent, late.limit)


def _done(everybody: Sequence[Suspect], history: History) -> dict[str, int | None]:
    """What each group has done in this transfer: its member that is furthest behind; None where a start was not seen."""
    done: dict[str, int | None] = {}
    for name in dict.fromkeys(one.group.name for one in everybody):
        tracks = [history.tracks[name, one.rank] for one in everybody if one.group.name == name]
        amounts = [track.progress - track.began_progress for track in tracks if track.began_progress is not None]
        done[name] = min(amounts) if len(amounts) == len(tracks) else None
    return done
