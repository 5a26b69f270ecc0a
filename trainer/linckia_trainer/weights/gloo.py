"""The trainer's side of weight transfer on CPU: a private pair of processes per engine, so that none waits for another."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from linckia_trainer.weights.buckets import Parameter, bucket_size, buckets, pack

TRAINER_RANK, ENGINE_RANK = 0, 1
NUM_BUFFERS = 2  # one is packed while the other travels


def gloo_pair(
    host: str, port: int, key: str, rank: int, timeout: float, store: TCPStore | None = None
) -> ProcessGroupGloo:
    """One side of the pair named ``key``; waits for the other at most ``timeout`` seconds."""
    limit = timedelta(seconds=timeout)
    store = store or TCPStore(host, port, is_master=False, timeout=limit)
    return ProcessGroupGloo(PrefixStore(key, store), rank, 2, limit)


class GlooSender:
    """Sends buckets to every connected engine."""

    def __init__(self, host: str, timeout: float) -> None:
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.host = host
        self.timeout = timeout
        self.pairs: dict[str, Any] = {}

    def endpoint(self) -> tuple[str, int]:
        """Where engines connect: (host, port)."""
        return self.host, self.store.port

    def connect(self, key: str) -> None:
        """Meet the engine that connects with ``key`` (engine and its generation)."""
        self.pairs[key] = gloo_pair(self.host, self.store.port, key, TRAINER_RANK, self.timeout, self.store)

    def send(
        self,
        layout: Sequence[Parameter],
        bucket_bytes: int,
        gather: Callable[[list[str]], Iterator[tuple[str, Tensor]]],
        keys: Sequence[str],
    ) -> dict[str, str]:
        """Send every parameter to the engines ``keys``; returns {key: what happened} of those that were lost on the way.

        ``gather`` gives whole tensors by name; it is called once per bucket, on every rank in the same order.
        """
        planned = buckets(layout, bucket_bytes)
        size = max(bucket_size(bucket) for bucket in planned)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(NUM_BUFFERS, len(planned)))]
        flying: list[dict[str, Any]] = [{} for _ in buffers]
        lost: dict[str, str] = {}
        for number, bucket in enumerate(planned):
            slot = number % len(buffers)
            self._land(flying[slot], lost)
            tensors = [tensor for _, tensor in gather([parameter.name for parameter in bucket])]
            flat = pack(bucket, tensors, buffers[slot])
            flying[slot] = {key: self.pairs[key].send([flat], ENGINE_RANK, 0) for key in keys if key not in lost}
        for works in flying:
            self._land(works, lost)
        return lost

    def _land(self, works: dict[str, Any], lost: dict[str, str]) -> None:
        for key, work in works.items():
            try:
                work.wait()
            except RuntimeError as error:  # the other side died: its pair is of no use any more
                lost[key] = str(error).splitlines()[0]
                self.pairs.pop(key, None)
