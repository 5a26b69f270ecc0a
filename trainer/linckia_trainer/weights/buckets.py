"""Parameters packed into flat buckets. Both sides derive the same buckets from the same layout; importable without vLLM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALONE_BYTES = 1 << 20


@dataclass(frozen=True)
class Parameter:
    """Name, shape and dtype of one parameter as it travels.

    Example: ``Parameter("model.norm.weight", (128,), "float32")``
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def buckets(layout: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Consecutive parameters, at most ``bucket_bytes`` together; a larger parameter is a bucket of its own."""
    packed: list[list[Parameter]] = []
    room = 0
    for parameter in layout:
        size = num_bytes(parameter)
        if not packed or size > room:
            packed.append([])
            room = bucket_bytes
        packed[-1].append(parameter)
        room -= size
    return packed


def pieces(bucket: Sequence[Parameter]) -> list[list[Parameter]]:
    """A bucket as it travels where tensors can be sent from their own memory: large parameters alone, others together.

    Copying a large parameter into a buffer costs more than one more message.
    """
    split: list[list[Parameter]] = []
    packing = False
    for parameter in bucket:
        small = num_bytes(parameter) < ALONE_BYTES
        if small and packing:
            split[-1].append(parameter)
        else:
            split.append([parameter])
        packing = small
    return split


def num_bytes(parameter: Parameter) -> int:
    """Bytes that a parameter takes in a bucket: its own, rounded up so that the next one starts aligned."""
    import torch

    count = 1
    for extent in parameter.shape:
        count *= extent
    size: int = count * getattr(torch, parameter.dtype).itemsize
    return -(-size // 16) * 16


def pack(bucket: Sequence[Parameter], tensors: Sequence["Tensor"], flat: "Tensor") -> "Tensor":
    """Copy the tensors of a bucket into the start of ``flat`` (uint8); returns the part that was filled."""
    import torch

    end = 0
    for parameter, tensor in zip(bucket, tensors, strict=True):
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat[end : end + source.numel()].copy_(source)
        end += num_bytes(parameter)
    return flat[:end]


def unpack(bucket: Sequence[Parameter], flat: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
    """(name, tensor) of each parameter: views into ``flat``."""
    import torch

    start = 0
    for parameter in bucket:
        dtype = getattr(torch, parameter.dtype)
        count = 1
        for extent in parameter.shape:
            count *= extent
        part = flat[start : start + count * dtype.itemsize]
        yield parameter.name, part.view(dtype).view(parameter.shape)
        start += num_bytes(parameter)


def bucket_size(bucket: Sequence[Parameter]) -> int:
    return sum(num_bytes(parameter) for parameter in bucket)
