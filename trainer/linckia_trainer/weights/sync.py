"""The controller's part of weight transfer: who is connected to whom, and which weights each engine serves."""

from collections.abc import Sequence

import ray

from linckia.api.config import RunConfig
from linckia_trainer.groups.engine_errors import EnginesLostError
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.group import ActorGroup, Call


class WeightSync:
    """Gives every engine the policy's weights. An engine that has not got them is stale and gets no prompts."""

    def __init__(self, config: RunConfig, first_weights_travel: bool) -> None:
        self.config = config
        self.first_weights_travel = first_weights_travel  # a fork's state 0 is not what the model folder holds
        self.connected: tuple[int, list[str]] = (0, [])
        self.served: dict[str, tuple[int, int]] = {}

    def serves(self, engine: ActorGroup, step: int) -> bool:
        """Whether an engine holds the weights after ``step``, of whichever policy generation."""
        return self.served.get(key_of(engine), (-1, 0))[0] == step

    def sync(self, step: int, policy: ActorGroup, engines: Sequence[ActorGroup]) -> list[GroupLostError]:
        """Bring every engine to (step, policy generation); the policy stands at ``step``.

        Returns the engines that were lost; the others have the weights. Raises GroupLostError if the policy is lost: its
        engines then keep the weights they had and are stale.
        """
        version = (step, policy.generation)
        stale = [engine for engine in engines if self.served.get(key_of(engine)) != version]
        if not stale:
            return []
        if step == 0 and not self.first_weights_travel:
            return self._served([(engine, engine.start("assume_weights", *version)) for engine in stale], version)
        losses = self._connect(policy, stale)
        gone = {loss.group for loss in losses}
        joined = [engine for engine in stale if engine.name not in gone]
        if not joined:
            return losses
        send = policy.start("send_weights")
        receives = [(engine, engine.start("receive_weights", *version)) for engine in joined]
        await_sender(send)
        return losses + self._served(receives, version)

    def _served(self, calls: list[tuple[ActorGroup, Call]], version: tuple[int, int]) -> list[GroupLostError]:
        losses = failed(calls)
        gone = {loss.group for loss in losses}
        self.served |= {key_of(engine): version for engine, _ in calls if engine.name not in gone}
        return losses

    def _connect(self, policy: ActorGroup, engines: Sequence[ActorGroup]) -> list[GroupLostError]:
        """A new round whenever its members changed: NCCL has one communicator over all of them."""
        round_of = (policy.generation, [key_of(engine) for engine in engines])
        if round_of == self.connected:
            return []
        self.connected = (0, [])
        dead = failed([(engine, engine.ask_status()) for engine in engines])  # whom nobody has called since
        gone = {loss.group for loss in dead}
        engines = [engine for engine in engines if engine.name not in gone]
        round_of = (policy.generation, [key_of(engine) for engine in engines])
        invitations = policy.call("open_transfer", round_of[1])[0]
        meetings = [(engine, engine.start("open_transfer", invitations[key_of(engine)])) for engine in engines]
        connecting = policy.start("connect_engines")
        give_up_lost(policy, connecting, meetings)
        await_sender(connecting)
        losses = failed(meetings)
        if not losses:
            self.connected = round_of
        return dead + losses


def give_up_lost(policy: ActorGroup, connecting: Call, meetings: list[tuple[ActorGroup, Call]]) -> None:
    """Until the policy has met the engines: tell it of those whose own call failed, for it waits for them."""
    meeting = {ref: (engine, call) for engine, call in meetings for ref in call}
    senders = list(connecting)
    pending = [*senders, *meeting]
    while any(ref in pending for ref in senders):
        ready, pending = ray.wait(pending, num_returns=1)
        for ref in ready:
            if ref in meeting and failed([meeting[ref]]):
                policy.tell("abandon_engine", key_of(meeting[ref][0]))


def await_sender(call: Call) -> None:
    """The policy's side of a transfer. That engines were lost on the way is theirs to say, and no fault of the policy."""
    try:
        call.results()
    except EnginesLostError:
        return


def failed(calls: list[tuple[ActorGroup, Call]]) -> list[GroupLostError]:
    """Wait for every call; the losses among them."""
    losses = []
    for _, call in calls:
        try:
            call.results()
        except GroupLostError as loss:
            losses.append(loss)
    return losses


def key_of(engine: ActorGroup) -> str:
    return f"{engine.name}/{engine.generation}"
