"""Weight transfer on CPU, both ends: a private pair of processes per engine, so that none waits for another."""

import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from linckia_trainer.weights.buckets import Parameter, bucket_size, buckets, num_bytes, pack, pieces, unpack
from linckia_trainer.weights.transfer import Gather, Invitation, gathered
from linckia_trainer.weights.vllm_plugin import BACKEND

TRAINER_RANK, ENGINE_RANK = 0, 1
NUM_FLYING = 4  # pieces under way at one time
LOOK_SECONDS = 0.002
MEET_SECONDS = 30.0  # for two that are both there


def gloo_pair(
    host: str, port: int, key: str, rank: int, timeout: float, store: TCPStore | None = None
) -> ProcessGroupGloo:
    """One side of the pair named ``key``; waits for the other at most ``timeout`` seconds."""
    limit = timedelta(seconds=timeout)
    store = store or TCPStore(host, port, is_master=False, timeout=limit)
    if rank == ENGINE_RANK:
        store.set(f"{key}/here", "")
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    # By default gloo listens where the host's own name points to, which on Debian is often 127.0.1.1.
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(PrefixStore(key, store), rank, 2, options)


def address_towards(host: str) -> str:
    """This machine's address on the network through which it reaches ``host``."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


class GlooSender:
    """Sends buckets to every engine of the round; an engine that dies or stalls is dropped and the others go on.

    A stalled engine is given up after half of ``timeout``, before the others lose patience with the sender.
    """

    def __init__(self, rank: int, host: str, layout: Sequence[Parameter], bucket_bytes: int, timeout: float) -> None:
        self.host = host
        self.layout = tuple(layout)
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        self.round = 0
        self.invited: list[str] = []
        self.abandoned: set[str] = set()
        self.pairs: dict[str, Any] = {}

    def invite(self, engines: Sequence[str], workers: int) -> dict[str, Invitation]:
        assert workers == 1, "an engine on CPU is one process"
        if self.store is None:
            return {}
        self.round += 1  # a store keeps the addresses of earlier rounds
        self.invited = list(engines)
        self.abandoned = set()
        self.pairs = {}
        return {
            engine: Invitation(
                BACKEND,
                {"host": self.host, "port": self.store.port, "key": self._key(engine), "timeout": self.timeout},
                self.layout,
                self.bucket_bytes,
            )
            for engine in engines
        }

    def connect(self) -> dict[str, str]:
        if self.store is None or not self.invited:
            return {}
        lost: dict[str, str] = {}
        with ThreadPoolExecutor(len(self.invited)) as pool:
            meetings = {engine: pool.submit(self._meet, engine) for engine in self.invited}
        for engine, meeting in meetings.items():
            try:
                self.pairs[engine] = meeting.result()
            except RuntimeError as error:  # it never came
                lost[engine] = reason(error)
        return lost

    def abandon(self, engine: str) -> None:
        self.abandoned.add(engine)

    def send(self, gather: Gather) -> dict[str, str]:
        lost: dict[str, str] = {}
        flying: deque[tuple[Tensor, dict[str, Any]]] = deque()  # holds the memory that is being read
        for bucket, tensors in gathered(self.layout, self.bucket_bytes, gather):
            if not self.pairs:
                continue
            by_name = {parameter.name: tensor for parameter, tensor in zip(bucket, tensors, strict=True)}
            for piece in pieces(bucket):
                while len(flying) >= NUM_FLYING:
                    self._land(flying.popleft()[1], lost)
                flat = as_bytes(piece, [by_name[parameter.name] for parameter in piece])
                flying.append((flat, self._launch(flat, lost)))
        for _, works in flying:
            self._land(works, lost)
        return lost

    def _launch(self, flat: Tensor, lost: dict[str, str]) -> dict[str, Any]:
        works: dict[str, Any] = {}
        for engine, pair in list(self.pairs.items()):
            try:
                works[engine] = pair.send([flat], ENGINE_RANK, 0)
            except RuntimeError as error:  # gone since the last bucket
                self._lose(engine, error, lost)
        return works

    def _land(self, works: dict[str, Any], lost: dict[str, str]) -> None:
        for engine, work in works.items():
            try:
                work.wait(timedelta(seconds=self.timeout / 2))
            except RuntimeError as error:  # died or stalled
                self._lose(engine, error, lost)

    def _lose(self, engine: str, error: RuntimeError, lost: dict[str, str]) -> None:
        lost.setdefault(engine, reason(error))
        self.pairs.pop(engine, None)  # of no use any more

    def _meet(self, engine: str) -> ProcessGroupGloo:
        """Pair up once the engine says that it is there: gloo's own wait cannot be ended, and holds the store meanwhile."""
        assert self.store is not None
        deadline = time.monotonic() + self.timeout
        while not self.store.check([f"{self._key(engine)}/here"]):
            if engine in self.abandoned:
                raise RuntimeError("it was lost before it came")
            if time.monotonic() > deadline:
                raise RuntimeError(f"it did not come within {self.timeout:g} s")
            time.sleep(LOOK_SECONDS)
        limit = min(self.timeout, MEET_SECONDS)
        return gloo_pair(self.host, self.store.port, self._key(engine), TRAINER_RANK, limit, self.store)

    def _key(self, engine: str) -> str:
        return f"{self.round}/{engine}"


class GlooReceiver:
    """An engine's end of its pair. Whole sets alone come out of it: ``receive`` raises RuntimeError if the sender is lost."""

    def __init__(self, host: str, port: int, key: str, timeout: float) -> None:
        self.pair: Any = gloo_pair(host, port, key, ENGINE_RANK, timeout)
        self.flats: list[Tensor] = []  # kept from transfer to transfer: fresh memory costs more than receiving into it

    def receive(self, layout: Sequence[Parameter], bucket_bytes: int) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every parameter: views that hold until the next call."""
        planned = [piece for bucket in buckets(layout, bucket_bytes) for piece in pieces(bucket)]
        if [len(flat) for flat in self.flats] != [bucket_size(bucket) for bucket in planned]:
            self.flats = [torch.empty(bucket_size(bucket), dtype=torch.uint8) for bucket in planned]
        for work in [self.pair.recv([flat], TRAINER_RANK, 0) for flat in self.flats]:
            work.wait()
        return [pair for bucket, flat in zip(planned, self.flats, strict=True) for pair in unpack(bucket, flat)]


def as_bytes(piece: Sequence[Parameter], tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of a piece: a tensor's own memory where it travels alone, else a packed copy."""
    if len(piece) == 1 and tensors[0].is_contiguous() and tensors[0].device.type == "cpu":
        own = tensors[0].detach().view(-1).view(torch.uint8)
        if own.numel() == num_bytes(piece[0]):
            return own
    return pack(piece, tensors, torch.empty(bucket_size(piece), dtype=torch.uint8))


def reason(error: Exception) -> str:
    """The first line of what gloo says, without the place in its source."""
    return str(error).splitlines()[0].rpartition("] ")[2]
