"""The first base class: a Ray actor that is also one torch.distributed rank."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray

from linckia.api.bundle import unpack_here
from linckia.api.errors import FencedError
from linckia_trainer.log.process import start_time
from linckia_trainer.made_model import fetch_model


@dataclass(frozen=True)
class Identity:
    """Who a member is. Immutable for its life.

    Example: ``Identity("demo-seed1", "policy", generation=1, rank=0, world_size=2, attempt=3)``
    """

    run: str
    group: str
    generation: int
    rank: int
    world_size: int
    attempt: int

    @property
    def name(self) -> str:
        return f"{self.run}/{self.group}/{self.generation}/{self.rank}"


class Progress:
    """A counter that grows while the member does useful work; safe to read from any thread."""

    def __init__(self) -> None:
        self.stage = "idle"
        self.count = 0
        self.changed = time.time()

    def tick(self, stage: str, amount: int = 1) -> None:
        self.stage = stage
        self.count += amount
        self.changed = time.time()

    def idle(self) -> None:
        self.stage = "idle"


class Member:
    """A rank: address, rendezvous, the gate every call passes, and a control surface that answers while it works."""

    def __init__(self, identity: Identity, device: str, threads: int, orphan_timeout: float) -> None:
        self.identity = identity
        self.device = device
        self.threads = threads
        self.progress = Progress()
        self.attempt = identity.attempt
        self.fenced = False
        self.loaded = ""  # what was loaded, as ``replace.loaded_word`` names it; "" before
        self.devices: list[str] = []  # of a standby: those of the member whose place it took
        self.last_heard = time.monotonic()
        threading.Thread(target=self._watch_orphan, args=(orphan_timeout,), daemon=True).start()

    def invoke(self, attempt: int, generation: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``method`` for an attempt, unless a newer attempt has been heard or this generation is fenced."""
        self._admit(attempt)
        if generation != self.identity.generation:
            raise FencedError(f"{self.identity.name} was called as generation {generation}")
        self.progress.tick(method, 0)
        try:
            return getattr(self, method)(*args, **kwargs)
        finally:
            self.progress.idle()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def status(self, attempt: int) -> dict[str, Any]:
        """Where this member stands; also the heartbeat of its controller."""
        self._admit(attempt)
        return {
            "rank": self.identity.rank,
            "generation": self.identity.generation,
            "pid": os.getpid(),
            "processes": processes(),
            "node_ip": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "placement_group": ray.get_runtime_context().get_placement_group_id(),
            "loaded": self.loaded,
            "devices": ray.get_runtime_context().get_accelerator_ids()["GPU"] or self.devices,
            "stage": self.progress.stage,
            "progress": self.progress.count,
            **self.describe(),
        }

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def fence(self, attempt: int) -> None:
        """Refuse everything from now on; a running update stops at its next micro-batch."""
        self._admit(attempt)
        self.fenced = True

    def fetch(self, config: Any) -> None:
        """Bring to this node what ``load`` will read and a pod does not have: the job's own files, and a model that was made."""
        unpack_here()
        fetch_model(config)

    def prepare(self, config: Any) -> None:
        """As a standby: import what ``load`` will need, and touch no device."""

    def take_devices(self, devices: list[list[str]]) -> None:
        """As a standby that becomes a member: use the devices of the one that was lost. ``devices``: by rank."""
        if self.device == "cuda" and devices:
            self.devices = devices[self.identity.rank]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)

    def declare_loaded(self, word: str) -> None:
        """All members of the group are loaded: from now on another attempt may take them over."""
        self.loaded = word

    def settle(self) -> None:
        """For an attempt that takes over: drop what an earlier one began and did not fetch. Error if that cannot be."""

    def describe(self) -> dict[str, Any]:
        """What a role adds to ``status``."""
        return {}

    def check_fence(self) -> None:
        if self.fenced:
            raise FencedError(f"{self.identity.name} is fenced")

    def open_rendezvous(self) -> tuple[str, int]:
        """On rank 0: listen on a port the system picks, so that nothing can race for it. Returns (host, port)."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int, timeout: float) -> None:
        """Form the torch.distributed world of this generation. ``timeout`` in seconds bounds every collective."""
        from datetime import timedelta

        import torch
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        torch.set_num_threads(self.threads)
        identity = self.identity
        limit = timedelta(seconds=timeout)
        store = self._store if identity.rank == 0 else TCPStore(host, port, is_master=False, timeout=limit)
        os.environ.update(RANK=str(identity.rank), WORLD_SIZE=str(identity.world_size), LOCAL_RANK="0")
        if self.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each member its own device alone
        torch.distributed.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=PrefixStore(f"{identity.group}/{identity.generation}", store),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=limit,
        )

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        return action() if self.identity.rank == 0 else None

    def _admit(self, attempt: int) -> None:
        if attempt < self.attempt:
            raise FencedError(f"attempt {attempt} was replaced by attempt {self.attempt}")
        self.check_fence()
        self.attempt = attempt
        self.last_heard = time.monotonic()

    def _watch_orphan(self, orphan_timeout: float) -> None:
        while time.monotonic() - self.last_heard < orphan_timeout:
            time.sleep(min(5.0, orphan_timeout / 4))
        os._exit(3)  # nobody has continued this run: free its devices


def processes() -> list[dict[str, int | None]]:
    """(pid, start time) of this process and all its children, which a fence has to see gone."""
    here = psutil.Process()
    pids = [here.pid, *(child.pid for child in here.children(recursive=True))]
    return [{"pid": pid, "start_time": start_time(pid)} for pid in pids]
