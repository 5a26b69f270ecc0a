"""CUDA IPC: engines on the policy's own GPUs read its packed buffer in place; only handles travel.

The handles go through a store that rank 0 opens, chunk by chunk, as vLLM's ``IPCWeightTransferEngine`` takes them; the
buffer is refilled once every engine has told that it has read it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from linckia_trainer.weights.buckets import Parameter, num_bytes
from linckia_trainer.weights.transfer import IPC, Gather, Invitation, gathered

END = "end"
# Of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``'s arguments: always the same for a flat byte buffer, so
# that plain data can travel instead of pickles.
FIXED = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}


class IpcSender:
    """Every policy rank packs the same chunks on its own GPU; rank 0 tells the engines all ranks' handles."""

    def __init__(self, rank: int, host: str, layout: Sequence[Parameter], bucket_bytes: int, timeout: float) -> None:
        self.rank = rank
        self.host = host
        self.layout = tuple(layout)
        self.bucket_bytes = max(bucket_bytes, *(num_bytes(parameter) for parameter in layout))
        self.timeout = timeout
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        self.round = 0
        self.engines: list[str] = []
        self.sent = 0

    def invite(self, engines: Sequence[str], workers: int) -> dict[str, Invitation]:
        self.round += 1
        self.engines, self.sent = list(engines), 0
        if self.store is None:
            return {}
        return {
            engine: Invitation(
                IPC,
                {"packed": True},
                self.layout,
                self.bucket_bytes,
                (self.host, self.store.port, f"{self.round}/{engine}"),
            )
            for engine in engines
        }

    def connect(self) -> dict[str, str]:
        return {}  # nothing to meet in: the memory is there

    def abandon(self, engine: str) -> None:
        return None  # nobody waits for it: there is no meeting

    def send(self, gather: Gather) -> dict[str, str]:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        lost: dict[str, str] = {}
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        for chunk in packed_ipc_producer(
            self._tensors(gather), uuid, lambda item: item[1], buffer_size_bytes=self.bucket_bytes
        ):
            handles = merged(chunk.ipc_handle)
            self._tell(
                {
                    "names": chunk.names,
                    "shapes": chunk.shapes,
                    "dtype_names": chunk.dtype_names,
                    "tensor_sizes": chunk.tensor_sizes,
                    "ipc_handles": handles,
                },
                lost,
            )
            _barrier()  # the other ranks' buffers are being read as well
        if self.store is not None:
            for engine in self.engines:
                self.store.set(self._key(engine), END)
        self.sent += 1
        _barrier()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return lost

    def _tell(self, update: dict[str, Any], lost: dict[str, str]) -> None:
        if self.store is not None:
            message = encode(update)
            waiting = [engine for engine in self.engines if engine not in lost]
            for engine in waiting:
                self.store.set(self._key(engine), message)
            for engine in waiting:
                try:
                    self.store.wait([self._key(engine) + "/read"], timedelta(seconds=self.timeout))
                except RuntimeError:
                    lost[engine] = f"did not read its weights within {self.timeout:g} s"
        self.sent += 1

    def _key(self, engine: str) -> str:
        return f"{self.round}/{engine}/{self.sent}"

    def _tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        for bucket, tensors in gathered(self.layout, self.bucket_bytes, gather):
            for parameter, tensor in zip(bucket, tensors, strict=True):
                yield parameter.name, tensor


class Listener:
    """An engine's end of the channel that handles are told through; it lives as long as its round."""

    def __init__(self, host: str, port: int, key: str, timeout: float) -> None:
        self.store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        self.key = key
        self.heard = 0

    def updates(self) -> Iterator[dict[str, Any]]:
        """The chunks of one set of weights; a chunk counts as read when the next one is asked for."""
        while True:
            key = f"{self.key}/{self.heard}"
            message = self.store.get(key)
            self.heard += 1
            if message == END.encode():
                return
            yield decode(message)
            self.store.set(f"{key}/read", "1")


def merged(handle: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """All ranks' handles, by GPU. Collective."""
    if torch.distributed.get_world_size() == 1:
        return dict(handle)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, handle)
    return {uuid: arguments for one in everyone for uuid, arguments in one.items()}


def encode(update: Mapping[str, Any]) -> str:
    """An update as JSON. The handles' constant arguments are left out, bytes become hex."""
    handles = {}
    for uuid, arguments in update["ipc_handles"].items():
        for index, constant in FIXED.items():
            assert arguments[index] == constant, f"argument {index} is {arguments[index]}, not {constant}"
        handles[uuid] = [None if index in FIXED else _plain(value) for index, value in enumerate(arguments)]
    return json.dumps({**update, "ipc_handles": handles})


def decode(message: bytes) -> dict[str, Any]:
    update: dict[str, Any] = json.loads(message)
    update["ipc_handles"] = {
        uuid: tuple(FIXED.get(index, _rich(value)) for index, value in enumerate(arguments))
        for uuid, arguments in update["ipc_handles"].items()
    }
    return update


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return tuple(value) if isinstance(value, list) else value


def _barrier() -> None:
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
