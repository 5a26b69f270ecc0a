"""The one way to storage: objects under keys in a place that a URI names.

A reader sees an object whole or not at all. ``put_if_absent`` is the run's only lock: of any number of writers of one
key exactly one is told True. Every error that a user can put right names ``run.dir`` or the storage option behind it.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from linckia.api.errors import UserError
from linckia_trainer.log.framing import Buffer
from linckia_trainer.log.local_files import LocalFiles
from linckia_trainer.log.objects import Backend, FsspecObjects, NoExclusiveCreate, ObjectInfo
from linckia_trainer.log.patience import Patience, patiently

Result = TypeVar("Result")
Data = Buffer | Sequence[Buffer]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG)
_RACERS = 8


class DiskFullError(UserError):
    """No space left; what was written before is whole, and nothing of the new object is to be seen."""


class UnreachableError(UserError):
    """A place that did not answer, or answered that something is wrong with it: it may pass."""


class Store:
    """Objects below ``uri``: a folder, ``file://`` or any fsspec URI (``s3://bucket/folder``).

    ``options`` are the filesystem's arguments, such as ``endpoint_url``. ``single_writer``: the user promises to start
    one controller at a time, so a place without exclusive create will do. Pickles; each process opens its own.

    A failure is raised at once, unless the store is ``patient``.

    Example: ``Store("s3://bucket/runs/first", {"endpoint_url": "http://localhost:9000"})``
    """

    def __init__(self, uri: str, options: dict[str, Any] | None = None, single_writer: bool = False) -> None:
        self.uri = uri
        self.options = dict(options or {})
        self.single_writer = single_writer
        self.patience = Patience()
        self._exclusive = True
        self._backend = _open_backend(uri, self.options)

    def __reduce__(self) -> tuple[type["Store"], tuple[str, dict[str, Any], bool]]:
        return Store, (self.uri, self.options, self.single_writer)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    @property
    def folder(self) -> Path | None:
        """The folder that this is; None for any other place."""
        return self._backend.root if isinstance(self._backend, LocalFiles) else None

    def patient(self, patience: Patience) -> "Store":
        """The same place, whose failures are waited out as long as ``patience`` lasts; pickled it has none."""
        store = Store(self.uri, self.options, self.single_writer)
        store._exclusive = self._exclusive
        store.patience = patience
        return store

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless its key exists; True if it was this call that made it."""
        tries = 0

        def create() -> bool:
            nonlocal tries
            tries += 1
            made = self._create(key, data)
            # An earlier try may have made it, and only its answer been lost.
            return made or (tries > 1 and self._backend.read(key) == b"".join(_buffers(data)))

        return self._ask(key, create)

    def _create(self, key: str, data: Data) -> bool:
        if not self._exclusive:
            return self._put_unless_seen(key, data)
        try:
            return self._backend.create(key, _buffers(data))
        except NoExclusiveCreate as reason:
            if not self.single_writer:
                raise _no_lock(self.uri, str(reason)) from reason
            self._exclusive = False
            return self._put_unless_seen(key, data)

    def put(self, key: str, data: Data) -> None:
        """Write an object, over another if there is one."""
        self._ask(key, lambda: self._backend.replace(key, _buffers(data)))

    def get(self, key: str) -> bytes:
        """The whole object. FileNotFoundError if it is not there."""
        return self._ask(key, lambda: self._backend.read(key))

    def read_start(self, key: str, num_bytes: int) -> bytes:
        """The first ``num_bytes`` of an object, fewer if it is shorter. FileNotFoundError if it is not there."""
        start = self.read_starts([key], num_bytes)[0]
        if start is None:
            raise FileNotFoundError(f"{key} is not in {self.uri}")
        return start

    def read_starts(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """``read_start`` of many objects, side by side where the place can do that; None for one that is not there."""
        return self._ask(keys[0] if keys else "", lambda: self._backend.read_starts(keys, num_bytes))

    def exists(self, key: str) -> bool:
        try:
            self.info(key)
        except FileNotFoundError:
            return False
        return True

    def info(self, key: str) -> tuple[int, float]:
        """(size in bytes, time of the last change in seconds since 1970). FileNotFoundError if it is not there."""
        found = self._ask(key, lambda: self._backend.info(key))
        return found.size, found.modified

    def list(self, prefix: str = "") -> list[str]:
        """The sorted keys of all objects below a folder, such as ``log`` or ``state/policy``; "" for all there are."""
        return list(self.scan(prefix))

    def scan(self, prefix: str = "") -> dict[str, ObjectInfo]:
        """``list`` with size and time of each object, in one listing."""
        return dict(sorted(self._ask(prefix, lambda: self._backend.scan(prefix.rstrip("/"))).items()))

    def delete(self, key: str) -> None:
        """Remove an object, or all objects below a folder. Removing what is not there is no error."""
        self._ask(key, lambda: self._backend.delete(_checked(key)))

    def move(self, source: str, target: str) -> None:
        """Rename an object, or a folder with all below it, to a key that is free."""
        with self._clear_errors(source):
            self._backend.move(_checked(source), _checked(target))

    def sweep(self) -> None:
        """Remove what killed writers of this host left behind, where nobody sees it and it takes space."""
        with self._clear_errors(""):
            self._backend.sweep()

    def probe(self) -> None:
        """Find out, before anything starts, whether this place can hold a run; remove what killed writers left.

        UserError when it cannot be reached or written, or (unless ``single_writer``) lets one key be created twice.
        """
        folder = f"probe-{uuid.uuid4().hex}"
        try:
            reason = self._created_twice(folder)
            if reason and not self.single_writer:
                raise _no_lock(self.uri, reason)
            self._exclusive = self._exclusive and not reason
            self.delete(folder)
            self.sweep()
        except FileNotFoundError as error:
            raise UserError(
                "run.dir", self.uri, f"the bucket or folder does not exist ({error})",
                "make it, or correct run.dir or storage.options",
            ) from error  # fmt: skip

    def _created_twice(self, folder: str) -> str:
        """Why this place is no lock; "" if it is one."""
        first = f"{folder}/first"
        if not self.put_if_absent(first, b"1") or self.put_if_absent(first, b"2") or self.get(first) != b"1":
            return "it let one key be created twice"
        # a create that looks first and writes then passes the test above and fails this one
        barrier = Barrier(_RACERS)

        def race(number: int) -> bool:
            barrier.wait()
            return self.put_if_absent(f"{folder}/race", str(number).encode())

        with ThreadPoolExecutor(_RACERS) as pool:
            winners = sum(pool.map(race, range(_RACERS)))
        return "" if winners == 1 else f"{winners} of {_RACERS} writers created one key at one time"

    def _put_unless_seen(self, key: str, data: Data) -> bool:
        if self.exists(key):
            return False
        self.put(key, data)
        return True

    def _ask(self, key: str, ask: Callable[[], Result]) -> Result:
        """``ask()`` with clear errors, again while the place fails and patience lasts."""

        def once() -> Result:
            with self._clear_errors(key):
                return ask()

        try:
            return patiently(once, _may_pass, self.patience, self.uri)
        except OSError as error:
            if self.patience.seconds == 0 or not _may_pass(error):
                raise
            raise UnreachableError(
                "run.dir", self.uri, f"has failed for {self.patience.seconds:.0f} s ({error})",
                "see that the storage is up; then the same command goes on",
            ) from error  # fmt: skip

    @contextlib.contextmanager
    def _clear_errors(self, key: str) -> Iterator[None]:
        """Say what a user can do about an error. FileNotFoundError stays: it is an answer, not a failure."""
        try:
            yield
        except (FileNotFoundError, UserError):
            raise
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFullError(
                    "run.dir", self.uri, f"no space left while writing {key}", "free some space, then start again",
                ) from error  # fmt: skip
            if isinstance(error, PermissionError) or error.errno in _UNUSABLE:
                raise UserError(
                    "run.dir", self.uri, f"{key or 'it'} may not be read or written there ({error})",
                    "check the folder's owner and rights, or the key and secret in storage.options",
                ) from error  # fmt: skip
            raise
        except _botocore_errors(self.uri) as error:
            raise UnreachableError(
                "run.dir", self.uri, f"cannot be reached ({error})",
                "check the network, endpoint_url, key and secret in storage.options",
            ) from error  # fmt: skip


def _may_pass(error: Exception) -> bool:
    """Whether asking again may help: not after an answer (not there), nor for what a person has to put right."""
    return isinstance(error, UnreachableError) or (
        isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    )


def _open_backend(uri: str, options: dict[str, Any]) -> Backend:
    if ("://" not in uri and "::" not in uri) or uri.startswith(("file://", "local://")):
        path = uri.removeprefix("file://").removeprefix("local://")
        return LocalFiles(Path(os.path.abspath(Path(path).expanduser())))
    try:
        # never cached: another process may write at any moment
        uncached = {"use_listings_cache": False} if uri.startswith(("s3://", "s3a://")) else {}
        filesystem, root = url_to_fs(uri, **{**options, **uncached}, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise UserError(
            "run.dir", uri, str(error), "use a folder or an fsspec URI, such as s3://bucket/folder"
        ) from error
    except TypeError as error:
        raise UserError(
            "storage.options", options, str(error), f"use the arguments of the filesystem of {uri}"
        ) from error
    return FsspecObjects(filesystem, root)


def _botocore_errors(uri: str) -> tuple[type[Exception], ...]:
    """What an S3 client raises that is no OSError: no credentials, no such host, time-outs."""
    if not uri.startswith(("s3://", "s3a://")):
        return ()
    from botocore.exceptions import BotoCoreError  # part of s3fs, loaded for s3 alone

    return (BotoCoreError,)


def _no_lock(uri: str, reason: str) -> UserError:
    return UserError(
        "storage.single_writer", False, f"{uri} cannot keep two controllers apart: {reason}",
        "use another place for run.dir, or set storage.single_writer to true and start one controller at a time",
    )  # fmt: skip


def _buffers(data: Data) -> Sequence[Buffer]:
    return [data] if isinstance(data, bytes | bytearray | memoryview) else data


def _checked(key: str) -> str:
    assert key.strip("/"), "an empty key would be the whole run"
    return key.rstrip("/")
