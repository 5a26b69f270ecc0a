"""One framing for every object of a run: records, spooled trajectories, states.

Layout::

    magic      8 bytes   b"LINCKIA1"
    length     4 bytes   of the header, big-endian
    digest    32 bytes   sha256 of the header
    header     n bytes   canonical JSON; holds payload_bytes and payload_sha256
    payload              the rest

The digest covers the header and the header covers the payload, so any byte that was changed, cut off or added is found;
a header can be checked without its payload.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from linckia.api.errors import DamagedError

Buffer = bytes | bytearray | memoryview

MAGIC = b"LINCKIA1"
PREFIX_BYTES = len(MAGIC) + 4 + 32
MAX_HEADER_BYTES = 16 << 20  # a damaged length must not make anyone read gigabytes
FIRST_READ_BYTES = 4096  # holds the whole header of nearly every object: one read


def canonical_json(value: Any) -> bytes:
    """The one way we write hashed JSON: sorted keys, no spaces, UTF-8. ValueError on NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def frame(header: dict[str, Any], payload: Sequence[Buffer]) -> list[Buffer]:
    """The object as buffers to write one after the other; the payload's buffers are hashed, not copied."""
    digest = hashlib.sha256()
    for part in payload:
        digest.update(part)
    num_bytes = sum(memoryview(part).nbytes for part in payload)
    head = canonical_json({**header, "payload_bytes": num_bytes, "payload_sha256": digest.hexdigest()})
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(head)} bytes is longer than {MAX_HEADER_BYTES}")
    return [MAGIC + len(head).to_bytes(4, "big") + hashlib.sha256(head).digest() + head, *payload]


def pack(header: dict[str, Any], payload: Buffer) -> bytes:
    """The object as one piece of bytes. See ``frame`` for large payloads."""
    return b"".join(frame(header, [payload]))


def header_end(start: Buffer, name: str) -> int:
    """Where the payload begins, read from an object's first ``PREFIX_BYTES``.

    Raises DamagedError if this is no object of ours.
    """
    view = memoryview(start)
    if len(view) < PREFIX_BYTES:
        raise damaged(name, f"cut off after {len(view)} bytes, inside the first {PREFIX_BYTES}")
    if view[: len(MAGIC)] != MAGIC:
        raise damaged(name, f"does not start with {MAGIC.decode()}")
    length = int.from_bytes(view[len(MAGIC) : len(MAGIC) + 4], "big")
    if length > MAX_HEADER_BYTES:
        raise damaged(name, f"names a header of {length} bytes (at byte {len(MAGIC)}), which cannot be")
    return PREFIX_BYTES + length


def read_header(start: Buffer, name: str = "object") -> dict[str, Any]:
    """The checked header from an object's beginning (at least ``header_end`` bytes of it). Raises DamagedError."""
    view = memoryview(start)
    end = header_end(view, name)
    if len(view) < end:
        raise damaged(name, f"cut off after {len(view)} bytes, inside the header that ends at byte {end}")
    head = view[PREFIX_BYTES:end]
    if hashlib.sha256(head).digest() != view[len(MAGIC) + 4 : PREFIX_BYTES]:
        raise damaged(name, f"the header (bytes 0 to {end}) is not what was written")
    header: dict[str, Any] = json.loads(bytes(head))
    return header


def read_header_with(read: Callable[[int], Buffer], name: str) -> tuple[dict[str, Any], int]:
    """(header, where the payload begins) of an object whose first n bytes ``read(n)`` gives.

    Reads twice only if the header is longer than ``FIRST_READ_BYTES``. Raises DamagedError.
    """
    start = read(FIRST_READ_BYTES)
    end = header_end(start, name)
    if end > len(start) >= FIRST_READ_BYTES:
        start = read(end)
    return read_header(start, name), end


def unpack(data: Buffer, name: str = "object") -> tuple[dict[str, Any], memoryview]:
    """(header, payload) of a whole object; the payload is a view into ``data``. Raises DamagedError."""
    header = read_header(data, name)
    start = header_end(data, name)
    payload = memoryview(data)[start:]
    check_size(header, start, len(data), name)
    if hashlib.sha256(payload).hexdigest() != header["payload_sha256"]:
        raise damaged(name, f"the payload (from byte {start}) is not what was written")
    return header, payload


def check_size(header: dict[str, Any], payload_start: int, num_bytes: int, name: str) -> None:
    """Raises DamagedError unless an object of ``num_bytes`` has the payload its header names."""
    expected = payload_start + int(header["payload_bytes"])
    if num_bytes < expected:
        raise damaged(name, f"cut off after {num_bytes} of {expected} bytes, inside the payload")
    if num_bytes > expected:
        raise damaged(name, f"{num_bytes - expected} bytes too long: {expected} were written")


def damaged(name: str, reason: str, next_step: str | None = None) -> DamagedError:
    return DamagedError(name, None, reason, next_step or "restore the object from a copy, or move it away")
