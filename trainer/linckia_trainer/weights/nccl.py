"""The trainer's side of vLLM's packed NCCL broadcast: one communicator over policy rank 0 and every worker of the round.

Ranks: 0 is the policy, engine number i of ``w`` workers holds 1 + i*w and on. The engines run vLLM's own
``NCCLWeightTransferEngine``; what it expects is written down in ``vllm.distributed.weight_transfer.nccl_common``.
"""

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.transfer import NCCL, Gather, Invitation, gathered

NUM_BUFFERS = 2


class NcclSender:
    """Broadcasts to all engines of the round at once. A lost engine breaks the communicator for all: a new round forms one."""

    def __init__(self, rank: int, layout: Sequence[Parameter], bucket_bytes: int, timeout: float) -> None:
        self.rank = rank
        self.layout = tuple(layout)
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout
        self.engines: list[str] = []
        self.world_size = 0
        self.unique_id = b""
        self.communicator: Any = None

    def invite(self, engines: Sequence[str], workers: int) -> dict[str, Invitation]:
        self._leave()
        self.engines = list(engines)
        if self.rank != 0:
            return {}
        self.unique_id = new_unique_id()
        self.world_size = 1 + len(self.engines) * workers
        return {
            engine: Invitation(NCCL, self._init_info(1 + number * workers), self.layout, self.bucket_bytes)
            for number, engine in enumerate(self.engines)
        }

    def connect(self) -> dict[str, str]:
        if self.rank != 0:
            return {}
        import torch
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.accelerator.current_device_index()
        self.communicator = uid_init_process_group(self.unique_id, 0, self.world_size, device)
        return {}

    def abandon(self, engine: str) -> None:
        return None  # nothing ends the wait for a communicator's members but its own time limit

    def send(self, gather: Gather) -> dict[str, str]:
        tensors = self._tensors(gather)
        if self.rank != 0:
            for _ in tensors:
                pass
            return {}
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        try:
            with self._aborted_when_late():
                packed_nccl_broadcast_producer(
                    tensors,
                    self.communicator,
                    src=0,
                    post_iter_func=lambda item: item[1],
                    buffer_size_bytes=self.bucket_bytes,
                    num_buffers=NUM_BUFFERS,
                )
        except (RuntimeError, TimeoutError) as error:  # NCCL does not say which one: nobody has whole weights
            self._leave()
            return dict.fromkeys(self.engines, str(error))
        return {}

    def _init_info(self, rank_offset: int) -> dict[str, Any]:
        return {
            "nccl_unique_id_b64": base64.b64encode(self.unique_id).decode(),
            "rank_offset": rank_offset,
            "world_size": self.world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }

    def _tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        for bucket, tensors in gathered(self.layout, self.bucket_bytes, gather):
            for parameter, tensor in zip(bucket, tensors, strict=True):
                yield parameter.name, tensor

    @contextmanager
    def _aborted_when_late(self) -> Iterator[None]:
        """A broadcast that waits for a dead engine ends only when the communicator is aborted from another thread."""
        timer = threading.Timer(self.timeout, self._leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if self.communicator is None:
            raise TimeoutError(f"the broadcast was not over after {self.timeout:g} s")

    def _leave(self) -> None:
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.destroy()


def new_unique_id() -> bytes:
    """What NCCL needs to bring the ranks of a communicator together; no port of ours is involved."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId())
