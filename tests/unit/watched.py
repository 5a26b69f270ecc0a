"""Observations built by hand: a run whose members' stages and progress a test sets look by look."""

from dataclasses import dataclass, field

from linckia.api.config import Recovery
from linckia.api.names import actor_name, role_of
from linckia.decide.history import History, learn
from linckia.decide.limits import WatchPolicy
from linckia.decide.rules import Decision, decide, remember
from linckia.observe.observation import IDLE, ActorSeen, GroupSeen, MemberSeen, NodeSeen, Observation, RayState

RUN = "demo"
LOOK = 5.0


def policy(**keys: object) -> WatchPolicy:
    return WatchPolicy(Recovery.model_validate(keys))


@dataclass
class Watched:
    """A run that is looked at every five seconds. ``stages`` and ``progress`` are what its members would answer."""

    groups: dict[str, int] = field(default_factory=lambda: {"policy": 2})
    policy: WatchPolicy = field(default_factory=policy)
    time: float = 0.0
    step: int = 1
    stage: str = "update"
    history: History = field(default_factory=History)
    ray: RayState | None = None

    def __post_init__(self) -> None:
        self.members = [(name, rank) for name, size in self.groups.items() for rank in range(size)]
        self.generations = dict.fromkeys(self.groups, 1)
        self.stages = dict.fromkeys(self.members, IDLE)
        self.progress = dict.fromkeys(self.members, 0)
        self.silent: set[tuple[str, int]] = set()

    def observation(self) -> Observation:
        groups = tuple(
            GroupSeen(
                name,
                role_of(name),
                self.generations[name],
                size,
                tuple(self._member(name, rank) for rank in range(size)),
            )
            for name, size in self.groups.items()
        )
        return Observation(self.time, RUN, self.step, self.stage, groups, self.ray or self.alive())

    def _member(self, name: str, rank: int) -> MemberSeen:
        key = (name, rank)
        if key in self.silent:
            return MemberSeen(rank, answered=False)
        return MemberSeen(rank, True, self.stages[key], self.progress[key], 100 + rank, "n1")

    def alive(self, *others: ActorSeen, nodes: tuple[NodeSeen, ...] = ()) -> RayState:
        """Everybody ALIVE but ``others``."""
        named = {one.name for one in others}
        actors = [
            ActorSeen(actor_name(RUN, name, self.generations[name], rank), "ALIVE", 100 + rank, "n1")
            for name, rank in self.members
        ]
        return RayState((*[one for one in actors if one.name not in named], *others), nodes, ())

    def look(self) -> list[Decision]:
        """One look, five seconds after the last; what is decided is carried out, so it is remembered."""
        self.time += LOOK
        observation = self.observation()
        self.history = learn(self.history, observation)
        decisions = decide(observation, self.policy, self.history, self.time)
        for decision in decisions:
            self.history = remember(self.history, decision, self.time)
        return decisions

    def looks(self, seconds: float) -> list[Decision]:
        """Looks for so many seconds; all that was decided."""
        found = []
        for _ in range(int(seconds / LOOK)):
            found += self.look()
        return found

    def busy(self, stage: str, *names: str, ticks: int = 1, seconds: float = 60.0, others_idle: bool = True) -> None:
        """A whole stage of some groups: ``ticks`` of each member at every look; nothing may be decided of it."""
        taking_part = [key for key in self.members if key[0] in (names or self.groups)]
        self.enter(stage, *names)
        for _ in range(int(seconds / LOOK)):
            for key in taking_part:
                self.progress[key] += ticks
            assert self.look() == []
        self.enter(IDLE, *names)
        assert self.look() == []

    def enter(self, stage: str, *names: str) -> None:
        for key in self.members:
            if key[0] in (names or self.groups):
                self.stages[key] = stage

    def quiet_until_decided(self, limit: float = 100_000.0) -> tuple[float, list[Decision]]:
        """(seconds until something is decided while nothing changes, what)."""
        began = self.time
        while self.time - began < limit:
            if decisions := self.look():
                return self.time - began, decisions
        return self.time - began, []
