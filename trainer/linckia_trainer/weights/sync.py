"""The controller's part of weight transfer: who is connected to whom, and which weights each engine serves."""

from collections.abc import Sequence

import ray

from linckia.api.config import RunConfig
from linckia_trainer.groups.group import ActorGroup


class WeightSync:
    """Gives every engine the policy's weights. An engine that has not got them is stale and gets no prompts."""

    def __init__(self, config: RunConfig, first_weights_travel: bool) -> None:
        self.config = config
        self.first_weights_travel = first_weights_travel  # a fork's state 0 is not what the model folder holds
        self.connected: tuple[int, list[str]] = (0, [])
        self.served: dict[str, tuple[int, int]] = {}

    def sync(self, step: int, policy: ActorGroup, engines: Sequence[ActorGroup]) -> None:
        """Bring every engine to (step, policy generation); the policy stands at ``step``."""
        version = (step, policy.generation)
        stale = [engine for engine in engines if self.served.get(key_of(engine)) != version]
        if not stale:
            return
        if step == 0 and not self.first_weights_travel:
            waits = [ref for engine in stale for ref in engine.start("assume_weights", *version)]
        else:
            self._connect(policy, stale)
            sends = policy.start("send_weights")
            waits = [ref for engine in stale for ref in engine.start("receive_weights", *version)]
            waits += sends
        ray.get(waits)
        self.served.update({key_of(engine): version for engine in stale})

    def _connect(self, policy: ActorGroup, engines: Sequence[ActorGroup]) -> None:
        """A new round whenever its members changed: NCCL has one communicator over all of them."""
        round_of = (policy.generation, [key_of(engine) for engine in engines])
        if round_of == self.connected:
            return
        self.connected = (0, [])
        invitations = policy.call("open_transfer", round_of[1])[0]
        waits = [ref for engine in engines for ref in engine.start("open_transfer", invitations[key_of(engine)])]
        waits += policy.start("connect_engines")
        ray.get(waits)
        self.connected = round_of


def key_of(engine: ActorGroup) -> str:
    return f"{engine.name}/{engine.generation}"
