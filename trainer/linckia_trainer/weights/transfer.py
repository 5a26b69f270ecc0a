"""What every way for weights to travel has in common: an invitation per engine, a sender per policy rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.groups.engine_errors import EnginesLostError
from linckia_trainer.weights.buckets import Parameter, buckets
from linckia_trainer.weights.vllm_plugin import BACKEND as GLOO

if TYPE_CHECKING:
    from torch import Tensor

NCCL, IPC = "nccl", "ipc"  # as vLLM names them

# Whole tensors by name, in the order asked for. Collective: every policy rank calls it with the same names.
Gather = Callable[[list[str]], "Iterator[tuple[str, Tensor]]"]


@dataclass(frozen=True)
class Invitation:
    """What an engine needs to meet the policy: ``init_info`` is what vLLM's transfer engine of that backend takes.

    Example: ``Invitation("gloo", {"host": "10.0.0.4", "port": 40021, "key": "1/rollout-0/1", "timeout": 600}, layout, 16 << 20)``
    """

    backend: str
    init_info: Mapping[str, Any]
    layout: tuple[Parameter, ...]
    bucket_bytes: int
    channel: tuple[str, int, str] | None = None  # IPC: (host, port, key) where handles are told


class Sender(Protocol):
    """One policy rank's side. ``invite``, ``connect`` and ``send`` are called on every rank with the same engines.

    ``connect`` and ``send`` return {engine: what happened} of the engines that were lost; the others went on.
    """

    def invite(self, engines: Sequence[str], workers: int) -> dict[str, Invitation]:
        """Invitations to a new round of these engines, each of ``workers`` processes; empty on ranks other than 0."""

    def connect(self) -> dict[str, str]:
        """Meet the invited engines, who join at the same time."""

    def abandon(self, engine: str) -> None:
        """An invited engine is lost: do not wait for it any more. From another thread than ``connect``'s."""

    def send(self, gather: Gather) -> dict[str, str]:
        """Send every parameter to the engines of this round."""


def make_sender(
    backend: str, rank: int, host: str, layout: Sequence[Parameter], bucket_bytes: int, timeout: float
) -> Sender:
    """The sender of a policy rank on ``host``; ``timeout`` in seconds bounds what it waits for one engine."""
    if backend == GLOO:
        from linckia_trainer.weights.gloo import GlooSender

        return GlooSender(rank, host, layout, bucket_bytes, timeout)
    if backend == NCCL:
        from linckia_trainer.weights.nccl import NcclSender

        return NcclSender(rank, layout, bucket_bytes, timeout)
    from linckia_trainer.weights.ipc import IpcSender

    return IpcSender(rank, host, layout, bucket_bytes, timeout)


def receiver(invitation: Invitation, timeout: float) -> Callable[[], Iterator[dict[str, Any]]]:
    """The engine's side: a function that gives what to hand to vLLM's ``update_weights``, call by call, for one whole set."""
    if invitation.backend == GLOO:
        update = {"layout": list(invitation.layout), "bucket_bytes": invitation.bucket_bytes}
    elif invitation.backend == NCCL:
        update = described(invitation.layout)
    else:
        from linckia_trainer.weights.ipc import Listener

        assert invitation.channel is not None
        return Listener(*invitation.channel, timeout).updates
    return lambda: iter([update])


def described(layout: Sequence[Parameter]) -> dict[str, Any]:
    """A layout as vLLM's own transfer engines take it."""
    return {
        "names": [parameter.name for parameter in layout],
        "dtype_names": [parameter.dtype for parameter in layout],
        "shapes": [list(parameter.shape) for parameter in layout],
    }


def gathered(
    layout: Sequence[Parameter], bucket_bytes: int, gather: Gather
) -> "Iterator[tuple[Sequence[Parameter], list[Tensor]]]":
    """The tensors of each bucket; every rank has to go through all of it, in step, because gathering is collective."""
    for bucket in buckets(layout, bucket_bytes):
        yield bucket, [tensor for _, tensor in gather([parameter.name for parameter in bucket])]


def raise_lost(lost: Mapping[str, str]) -> None:
    """EnginesLostError that names the engines that were lost on the way."""
    if lost:
        raise EnginesLostError("; ".join(f"engine {engine}: {reason}" for engine, reason in lost.items()))


def transfer_backend(config: RunConfig, device: str) -> str:
    """``rollout.transfer`` by the name that vLLM knows it by; UserError where the device has no such way."""
    chosen = config.rollout.transfer
    if chosen == "auto":
        shared = config.placement.colocation == "all"
        chosen = "gloo" if device == "cpu" else ("cuda_ipc" if shared else "nccl")
    if device == "cpu" and chosen != "gloo":
        raise UserError("rollout.transfer", chosen, "it needs GPUs, and this run has none", "set it to auto or gloo")
    return {"gloo": GLOO, "cuda_ipc": IPC, "nccl": NCCL}[chosen]
