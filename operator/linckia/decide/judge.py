"""What a watcher does with each observation, whoever watches: learn, decide, have it carried out once, say each reason once."""

import time
from collections.abc import Callable

from linckia.decide.history import History, learn
from linckia.decide.limits import WatchPolicy
from linckia.decide.rules import Decision, decide, remember
from linckia.observe.observation import Observation


class Judge:
    """Remembers what one run has shown. The rules are pure; this holds the history between two looks.

    ``act`` carries a decision out and has to be idempotent: when it raises, the same decision is made again at the next
    look. ``say`` hears each reason once. ``stopped``: nothing more is to be done, asked between two decisions.
    """

    def __init__(
        self,
        policy: WatchPolicy,
        act: Callable[[Decision], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.policy = policy
        self.act = act
        self.say = say
        self.clock = clock
        self.stopped = stopped
        self.history = History()
        self.said: dict[str, str] = {}

    def look(self, observation: Observation) -> list[Decision]:
        """One look: learn, decide, act. Returns what was carried out."""
        problems = "; ".join(observation.ray.problems)
        if problems or "state API" in self.said:
            self.say_once("state API", f"the Ray state API is silent: {problems}" if problems else "it answers again")
        self.history = learn(self.history, observation)
        carried_out = []
        for decision in decide(observation, self.policy, self.history, self.clock()):
            if self.stopped():
                break
            about = f"{decision.action} {decision.group} {decision.generation}"
            if about not in self.said:
                self.say_once(about, f"{decision.action} {decision.group}: {decision.reason}")
            if self._carry_out(decision):
                self.history = remember(self.history, decision, self.clock())
                carried_out.append(decision)
        return carried_out

    def _carry_out(self, decision: Decision) -> bool:
        about = f"{decision.action} {decision.group}"
        try:
            self.act(decision)
        except Exception as error:  # noqa: BLE001 - whatever stands in the way, the next look tries again
            self.say_once(f"cannot {about}", f"cannot {about}: {type(error).__name__}: {error}")
            return False
        return True

    def say_once(self, about: str, text: str) -> None:
        if self.said.get(about) != text:
            self.said[about] = text
            self.say(text)
