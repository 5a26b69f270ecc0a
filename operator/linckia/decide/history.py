"""What a run has shown so far: where each member stands, and how long each role's stages take. Bounded memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from linckia.decide.pace import Paces, with_pace
from linckia.decide.statistics import LogStatistics
from linckia.observe.observation import IDLE, GroupSeen, MemberSeen, Observation

# The policy and the engines wait for each other in these; every other stage is a group's own.
TRANSFER_STAGES = frozenset({"open_transfer", "connect_engines", "send_weights", "receive_weights", "sync"})
STARTING = "start"  # the stage of a member that has not answered yet
MAX_STAGES = 64  # of each role; stages are a fixed few, so more of them are not what they should be

MemberKey = tuple[str, int]
"""(group, rank)"""
StageKey = tuple[str, str]
"""(role, stage)"""


@dataclass(frozen=True)
class Track:
    """One member in its stage. Times are seconds of the watcher's clock.

    ``since`` is when its stage or progress was last seen to change, ``answered`` when it last answered its control call,
    ``began`` and ``first_progress`` when its stage was first seen; ``began_progress`` is its progress before the stage,
    None where that is not known because nobody saw it idle before. ``stood``: an answer has shown it standing since.
    ``steps`` counts the ticks of the stage, as far as they can be told apart; ``longest`` is the longest of them.
    """

    generation: int
    stage: str
    progress: int
    since: float
    answered: float
    began: float
    began_progress: int | None
    first_progress: int = 0
    stood: bool = False
    steps: int = 0
    longest: float = 0.0
    looks: int = 1
    node_id: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class StageTimes:
    """How long a role's stage takes: one value per time it ran of its whole seconds and of its mean seconds per tick.

    ``longest_tick`` and ``longest`` are the longest single wait between two ticks and the longest whole time, seconds.
    """

    ticks: LogStatistics = field(default_factory=LogStatistics)
    wholes: LogStatistics = field(default_factory=LogStatistics)
    longest_tick: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Decided:
    """What was decided about a generation, so that it is decided once."""

    generation: int
    actions: frozenset[str]


@dataclass(frozen=True)
class History:
    """Everything that ``decide`` knows beside the observation. Begins empty; ``learn`` makes the next one.

    ``silences``: the longest a member of the role did not answer and then did, seconds.
    ``last_restart``: when a restart was last decided, or a new generation seen, by the watcher's clock. Who waited for
    that group stood through no fault of its own: what it took says nothing about its stage.
    """

    tracks: Mapping[MemberKey, Track] = field(default_factory=dict)
    times: Mapping[StageKey, StageTimes] = field(default_factory=dict)
    silences: Mapping[str, float] = field(default_factory=dict)
    paces: Paces = field(default_factory=Paces)
    decided: Mapping[str, Decided] = field(default_factory=dict)
    last_restart: float | None = None


def learn(history: History, observation: Observation) -> History:
    """The history with one more observation. Members and decisions of generations that are gone are forgotten."""
    tracks: dict[MemberKey, Track] = {}
    learned = _Learned(dict(history.times), dict(history.silences), history.paces, history.last_restart)
    for group in observation.groups:
        for member in group.members:
            key = (group.name, member.rank)
            before = history.tracks.get(key)
            if before is not None and before.generation != group.generation:
                before = None
                learned.paces = learned.paces.without_group(group.name)
                learned.last_restart = observation.time
            tracks[key] = _track(before, group, member, observation, learned)
    current = {group.name: group.generation for group in observation.groups}
    decided = {name: one for name, one in history.decided.items() if current.get(name) == one.generation}
    paces = learned.paces.without_others({(group, rank) for group, rank in tracks})
    return History(tracks, learned.times, learned.silences, paces, decided, learned.last_restart)


@dataclass
class _Learned:
    """What one ``learn`` adds to; it is thrown away after."""

    times: dict[StageKey, StageTimes]
    silences: dict[str, float]
    paces: Paces
    last_restart: float | None

    def stage_over(self, role: str, track: Track, end: float) -> None:
        """A stage has ended: its mean tick, and how long it took."""
        key = (role, track.stage)
        if key not in self.times and sum(known == role for known, _ in self.times) >= MAX_STAGES:
            return
        at = self.times.get(key, StageTimes())
        whole = end - track.began
        # Time after the last tick belongs to the stage's mean tick too: a stage without any is one long tick.
        mean = whole / max(1, track.steps)
        self.times[key] = StageTimes(
            at.ticks.with_value(mean),
            at.wholes.with_value(whole),
            max(at.longest_tick, track.longest),
            max(at.longest, whole),
        )

    def silence_over(self, role: str, seconds: float) -> None:
        self.silences[role] = max(self.silences.get(role, 0.0), seconds)


def _track(
    before: Track | None, group: GroupSeen, member: MemberSeen, observation: Observation, learned: _Learned
) -> Track:
    now = observation.time
    if not member.answered:
        return before or Track(group.generation, STARTING, 0, now, now, now, None)
    if before is None:
        return _entered(group, member, now, None)
    learned.silence_over(group.role, now - before.answered)
    if member.stage == before.stage:
        if member.progress == before.progress:
            return replace(before, answered=now, stood=True, looks=before.looks + 1)
        return _ticked(before, member, now)
    _leave(before, group, member, observation, learned)
    # Only a member that was idle, or waits in another call of the same work, has done nothing else since the last look.
    known = before.progress if before.stage == IDLE else None
    if before.stage in TRANSFER_STAGES and member.stage in TRANSFER_STAGES:
        known = before.began_progress
    entered = _entered(group, member, now, known)
    if member.stage == IDLE or known is None or member.progress <= before.progress:
        return entered
    # It began since the last look and has ticked: of a stage shorter than a look nothing more is ever seen.
    grown = member.progress - before.progress
    return replace(entered, began=before.answered, first_progress=before.progress, steps=grown)


def _entered(group: GroupSeen, member: MemberSeen, now: float, progress_before: int | None) -> Track:
    return Track(
        group.generation, member.stage, member.progress, now, now, now, progress_before, member.progress,
        node_id=member.node_id, pid=member.pid,
    )  # fmt: skip


def _ticked(before: Track, member: MemberSeen, now: float) -> Track:
    """Progress in the same stage. Seen standing in between, it was one tick, whatever it counts; else as many as it counts."""
    grown = max(1, member.progress - before.progress)
    steps, longest = (1, now - before.since) if before.stood else (grown, (now - before.since) / grown)
    return replace(
        before,
        progress=member.progress,
        since=now,
        answered=now,
        stood=False,
        steps=before.steps + steps,
        longest=max(before.longest, longest),
        looks=before.looks + 1,
    )


def _leave(before: Track, group: GroupSeen, member: MemberSeen, observation: Observation, learned: _Learned) -> None:
    """The member is in another stage than at the last look: what its last one has shown."""
    if before.stage == IDLE or (learned.last_restart is not None and before.began <= learned.last_restart):
        return
    now = observation.time
    last = replace(before, longest=max(before.longest, now - before.since if before.stood else 0.0))
    learned.stage_over(group.role, last, now)
    done = before.progress - before.first_progress
    pace = (before.since - before.began) / done if done > 0 else 0.0
    if before.looks > 2 and pace > 0:
        learned.paces = with_pace(
            learned.paces, (group.role, before.stage), (group.name, member.rank), observation.step, pace
        )
