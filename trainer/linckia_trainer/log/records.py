"""A record's payload: one step's experience as safetensors bytes with a canonical JSON header.

The same header and arrays give the same bytes on every machine: the log's hash is over them.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from linckia_trainer.log.framing import Buffer, canonical_json

Arrays = dict[str, NDArray[Any]]
_HEADER = "header"


@dataclass(frozen=True)
class RecordHeader:
    """What a record says beside its arrays. Immutable and hashed: nothing in it may depend on who wrote it or when.

    ``cursor_before`` and ``cursor_after`` are positions in the prompt order: this step's are [before, after). A
    normaliser is ``{"count": .., "mean": .., "m2": ..}``. ``*_after`` is what the next step starts from.
    ``reward_part_names`` names the columns of the array ``reward_parts``.

    Example: ``RecordHeader(step=3, epoch=0, cursor_before=64, cursor_after=96, kl_coefficient=0.05,
    kl_coefficient_after=0.049, normalizer={"count": 64, "mean": 0.2, "m2": 3.1},
    normalizer_after={"count": 96, "mean": 0.3, "m2": 4.2}, reward_part_names=("exact",))``
    """

    step: int
    epoch: int
    cursor_before: int
    cursor_after: int
    kl_coefficient: float
    kl_coefficient_after: float
    normalizer: dict[str, Any]
    normalizer_after: dict[str, Any]
    reward_part_names: tuple[str, ...] = ()


class Carried(NamedTuple):
    """What one step hands to the next: the data cursor, the KL coefficient, the reward normaliser."""

    cursor: int
    kl_coefficient: float
    normalizer: dict[str, Any]


def carried(header: RecordHeader, skipped: bool) -> Carried:
    """What the step after this one starts from. A skipped record moves the cursor on and nothing else."""
    if skipped:
        return Carried(header.cursor_after, header.kl_coefficient, header.normalizer)
    return Carried(header.cursor_after, header.kl_coefficient_after, header.normalizer_after)


def encode(header: RecordHeader, arrays: Arrays) -> bytes:
    """The payload. ValueError if a number of the header is NaN or infinite."""
    # safetensors reads an array's memory as it lies, so a transposed or sliced one would be stored wrong
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data: bytes = save(dense, metadata={_HEADER: canonical_json(_plain(asdict(header))).decode()})
    return data


def decode(payload: Buffer) -> tuple[RecordHeader, Arrays]:
    """The header and the arrays (read-only) of a payload that ``framing.unpack`` has checked."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(json.loads(bytes(payload[8 : 8 + length]))["__metadata__"][_HEADER])
    header["reward_part_names"] = tuple(header["reward_part_names"])
    return RecordHeader(**header), load(bytes(payload))


def _plain(value: Any) -> Any:
    """NumPy numbers as Python's: the JSON must not depend on where a number came from."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
