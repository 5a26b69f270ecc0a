"""The embedded watcher: a thread that looks at the run, learns, decides and acts, while no call may ever fail.

All it sees and does comes in as functions, so it knows neither Ray nor the controller. The operator on Kubernetes uses
the same ``Judge``.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from linckia.decide.judge import Judge
from linckia.decide.limits import WatchPolicy
from linckia.decide.rules import Decision
from linckia.observe.observation import Observation, RayState, group_seen

Status = Mapping[str, Any]
Statuses = Callable[[], Mapping[str, tuple[int, Sequence[Status | None]]]]
"""For each group (generation, one status per rank); None for a member that has not answered in time."""
Where = Callable[[], tuple[int, str]]
"""(step, stage) of the main loop."""


def observe(run: str, statuses: Statuses, ray_state: Callable[[], RayState], where: Where, now: float) -> Observation:
    """Everything that can be seen of a run, at ``now``."""
    step, stage = where()
    groups = tuple(group_seen(name, generation, members) for name, (generation, members) in statuses().items())
    return Observation(now, run, step, stage, groups, ray_state())


class Watcher:
    """Looks every ``recovery.watch_seconds`` until it is closed.

    ``act`` carries a decision out and has to be idempotent: when it raises, the same decision is made again at the next
    look. ``say`` hears each reason once. ``close`` has to come before Ray shuts down: it waits for a look under way.
    """

    def __init__(
        self,
        run: str,
        policy: WatchPolicy,
        statuses: Statuses,
        ray_state: Callable[[], RayState],
        where: Where,
        act: Callable[[Decision], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
    ) -> None:
        self.run = run
        self.policy = policy
        self.statuses = statuses
        self.ray_state = ray_state
        self.where = where
        self.act = act
        self.clock = clock
        self.stop = stop or threading.Event()
        self.judge = Judge(policy, lambda decision: self.act(decision), say, clock, self.stop.is_set)
        self.thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> "Watcher":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> bool:
        """Stop looking. False if a look is still under way after ``timeout`` seconds (None: wait for it)."""
        self.stop.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(timeout)
        return not self.thread.is_alive()

    def look(self) -> list[Decision]:
        """One look: observe, learn, decide, act. Returns what was carried out."""
        return self.judge.look(observe(self.run, self.statuses, self.ray_state, self.where, self.clock()))

    def _watch(self) -> None:
        while not self.stop.wait(self.policy.recovery.watch_seconds):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a watcher that dies of one look would watch nothing ever after
                if not self.stop.is_set():
                    self.judge.say_once("look", f"the watcher could not look: {type(error).__name__}: {error}")
