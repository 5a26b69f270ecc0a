"""The bytes of one rank's state: our header, then the rank's checkpoint files as a tar.

Key: ``state/{group}/{step:08d}/{attempt}.{generation}/{rank}``, the same in every tier. The tar starts where the header
ends, so ``tail -c +N | tar t`` reads it without us.
"""

import io
import mmap
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath

from linckia_trainer.log import framing
from linckia_trainer.log.framing import Buffer, damaged
from linckia_trainer.log.store import Store

_KEY = re.compile(r"state/([^/]+)/(\d{8})/(\d+)\.(\d+)/(\d+)")
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class StateHeader:
    """What one rank's state is a state of. Immutable.

    ``step`` is the group's applied_step and ``log_hash`` the log's there; ``attempt`` and ``generation`` saved it.

    Example: ``StateHeader(run="first", group="policy", step=3, rank=0, world=2, log_hash="9f..", attempt=1,
    generation=1)``
    """

    run: str
    group: str
    step: int
    rank: int
    world: int
    log_hash: str
    attempt: int
    generation: int

    @property
    def key(self) -> str:
        return state_key(self.group, self.step, self.attempt, self.generation, self.rank)


def state_key(group: str, step: int, attempt: int, generation: int, rank: int) -> str:
    return f"state/{group}/{step:08d}/{attempt}.{generation}/{rank}"


def parse_key(key: str) -> tuple[str, int, int, int, int] | None:
    """(group, step, attempt, generation, rank) of a state's key; None if it is no such key."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], *(int(part) for part in match.groups()[1:]))  # type: ignore[return-value]


def write_state(store: Store, header: StateHeader, files: Iterable[tuple[str, Buffer]]) -> str:
    """Save one rank's state; returns its key. ``files``: (relative name, content), which are not copied in memory.

    A reader sees it whole or not at all. Saving the same state again writes over it.
    """
    store.put(header.key, state_object(header, files))
    return header.key


def state_object(header: StateHeader, files: Iterable[tuple[str, Buffer]]) -> list[Buffer]:
    """The bytes of ``write_state``, hashed but not written: the same go to every tier under ``header.key``."""
    return framing.frame({"kind": "state", **asdict(header)}, list(_tar(files)))


def read_state(store: Store, key: str) -> tuple[StateHeader, Iterator[tuple[str, memoryview]]]:
    """(header, files) of one rank's state, every byte checked; the files' contents are views of what was read.

    Raises DamagedError if it is not what was written, FileNotFoundError if it is not there.
    """
    header, files, _ = read_payload(store, key)
    return header, files


def read_payload(store: Store, key: str) -> tuple[StateHeader, Iterator[tuple[str, memoryview]], memoryview]:
    """As ``read_state``, with the tar itself too."""
    data = store.get(key)
    header, payload = framing.unpack(data, key)
    return header_of(header, key), _untar(data, len(data) - len(payload)), payload


def header_of(header: dict[str, object], key: str) -> StateHeader:
    """The state header of a checked object header. Raises DamagedError if the object lies under another's key."""
    try:
        found = StateHeader(**{one.name: header[one.name] for one in fields(StateHeader)})  # type: ignore[arg-type]
    except KeyError as error:
        raise damaged(key, f"its header has no {error}: it is no state") from error
    if found.key != key:
        raise damaged(key, f"it is the state {found.key}")
    return found


def extract(files: Iterable[tuple[str, Buffer]], folder: Path) -> None:
    """Write a state's files below ``folder``. ValueError if a name leads out of it."""
    for name, content in files:
        path = folder / _checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)


def folder_files(folder: Path) -> Iterator[tuple[str, Buffer]]:
    """(relative name, content) of all files below ``folder``, sorted; contents are mapped, not read into memory."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        with path.open("rb") as file:
            size = path.stat().st_size
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
        yield path.relative_to(folder).as_posix(), content


def _tar(files: Iterable[tuple[str, Buffer]]) -> Iterator[Buffer]:
    """A GNU tar as buffers; nothing in it but names and contents, so that equal files give equal bytes."""
    for name, content in files:
        member = tarfile.TarInfo(_checked_name(name))
        member.size = memoryview(content).nbytes
        yield member.tobuf(tarfile.GNU_FORMAT)
        yield content
        yield bytes(-member.size % _BLOCK)
    yield bytes(2 * _BLOCK)


def _untar(data: bytes, start: int) -> Iterator[tuple[str, memoryview]]:
    stream = io.BytesIO(data)  # shares the bytes until someone writes
    stream.seek(start)
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for member in tar:
            yield member.name, memoryview(data)[member.offset_data : member.offset_data + member.size]


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is no relative file name")
    return name
