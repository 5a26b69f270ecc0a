"""Objects of an fsspec filesystem: S3 and whatever else stores a key whole or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from linckia_trainer.log.framing import Buffer

_STREAM_BYTES = 64 << 20  # larger objects are sent in parts of this size, so that they are never copied whole


@dataclass(frozen=True)
class ObjectInfo:
    """``modified`` is in seconds since 1970."""

    size: int
    modified: float


class NoExclusiveCreate(Exception):  # noqa: N818 - a condition of the place, not a failure
    """The place cannot create a key exclusively."""


class Backend(Protocol):
    """What a place for objects does. ``data`` is buffers to write one after the other; missing: FileNotFoundError."""

    def create(self, key: str, data: Sequence[Buffer]) -> bool: ...
    def replace(self, key: str, data: Sequence[Buffer]) -> None: ...
    def read(self, key: str) -> bytes: ...
    def read_starts(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]: ...
    def scan(self, prefix: str) -> dict[str, ObjectInfo]: ...
    def info(self, key: str) -> ObjectInfo: ...
    def delete(self, key: str) -> None: ...
    def move(self, source: str, target: str) -> None: ...
    def sweep(self) -> None: ...


class FsspecObjects:
    """``root`` is the bucket and folder, as the filesystem writes it."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        while True:
            try:
                self._write(key, data, exclusive=True)
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError, ValueError) as error:
                raise NoExclusiveCreate(f"its filesystem refuses mode='create' ({error})") from error
            except OSError as error:
                # not every S3 server names the condition that failed, without which s3fs cannot tell what it means
                code = _client_code(error)
                if code in ("PreconditionFailed", "412"):
                    return False
                if code in ("NotImplemented", "501"):
                    raise NoExclusiveCreate("its server does not know If-None-Match") from error
                if code not in ("ConditionalRequestConflict", "409"):
                    raise
            else:
                return True
            # S3 answers 409 when two creates of one key overlap: whoever asks again learns who won

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        self._write(key, data, exclusive=False)

    def read(self, key: str) -> bytes:
        data: bytes = self.filesystem.cat_file(self._path(key))
        return data

    def read_starts(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """Asks for all at one time where the filesystem can; an empty object, which has no range, gives b""."""
        paths = [self._path(key) for key in keys]
        answers = self.filesystem.cat_ranges(paths, [0] * len(paths), [num_bytes] * len(paths), on_error="return")
        return [_start(answer) for answer in answers]

    def scan(self, prefix: str) -> dict[str, ObjectInfo]:
        self.filesystem.invalidate_cache()
        top = f"{self._path(prefix)}/" if prefix else f"{self.root}/"
        found = _find(self.filesystem, top.rstrip("/"))
        skip = len(self.root) + 1
        return {name[skip:]: _info(entry) for name, entry in found.items() if name.startswith(top)}

    def info(self, key: str) -> ObjectInfo:
        self.filesystem.invalidate_cache()
        entry = self.filesystem.info(self._path(key))
        if entry["type"] != "file":
            raise FileNotFoundError(key)
        return _info(entry)

    def delete(self, key: str) -> None:
        keys = list(self.scan(key))
        try:
            self.info(key)
            keys.append(key)
        except FileNotFoundError:
            pass
        if keys:
            self.filesystem.rm([self._path(one) for one in keys])

    def move(self, source: str, target: str) -> None:
        """Copy, then remove, one object after the other; a broken move can be done again."""
        keys = list(self.scan(source)) or [source]
        for key in keys:
            self.filesystem.cp_file(self._path(key), self._path(target + key.removeprefix(source)))
            self.filesystem.rm_file(self._path(key))

    def sweep(self) -> None:
        """Nothing to do: an object appears when it is complete."""

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _write(self, key: str, data: Sequence[Buffer], exclusive: bool) -> None:
        size = sum(memoryview(part).nbytes for part in data)
        if size >= 2 * _STREAM_BYTES and "s3" in self.filesystem.protocol:
            self._stream(key, data, exclusive)
        else:
            joined = b"".join(data)
            self.filesystem.pipe_file(self._path(key), joined, mode="create" if exclusive else "overwrite")

    def _stream(self, key: str, data: Sequence[Buffer], exclusive: bool) -> None:
        file = self.filesystem.open(self._path(key), "xb" if exclusive else "wb", block_size=_STREAM_BYTES)
        try:
            for part in data:
                view = memoryview(part).cast("B")
                for start in range(0, len(view), _STREAM_BYTES):
                    file.write(view[start : start + _STREAM_BYTES])
        except BaseException:
            file.discard()  # closing would publish what has been sent so far
            file.closed = True
            raise
        file.close()


def _find(filesystem: Any, top: str) -> dict[str, dict[str, Any]]:
    """Path -> entry of all files below ``top``. A failure is raised: fsspec's own ``find`` leaves out a folder that it could
    not list, and a run whose records were not listed would seem to have none."""
    kind = type(filesystem)
    is_async = issubclass(kind, AsyncFileSystem)
    if kind._find is not AsyncFileSystem._find if is_async else kind.find is not AbstractFileSystem.find:
        found: dict[str, dict[str, Any]] = filesystem.find(top, detail=True)
        return found
    found, folders = {}, [top]
    while folders:
        folder = folders.pop()
        try:
            entries = filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            continue
        folders += [one["name"] for one in entries if one["type"] == "directory" and one["name"] != folder]
        found |= {one["name"]: one for one in entries if one["type"] != "directory"}
    return found


def _client_code(error: OSError) -> str:
    """The S3 error code behind an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _start(answer: bytes | Exception) -> bytes | None:
    if isinstance(answer, FileNotFoundError):
        return None
    if isinstance(answer, OSError) and _client_code(answer) in ("InvalidRange", "416"):
        return b""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _info(entry: dict[str, Any]) -> ObjectInfo:
    """Filesystems differ in what they call the time of the last change, and in its type."""
    times = (entry.get(name) for name in ("LastModified", "mtime", "modified", "updated", "last_modified", "created"))
    modified = next((time for time in times if time is not None), 0.0)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    elif isinstance(modified, str):
        modified = datetime.fromisoformat(modified).timestamp()
    return ObjectInfo(int(entry["size"]), float(modified))
