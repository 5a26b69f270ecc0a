"""Objects as files of a folder: readers see a file whole or not at all, and never a temporary one."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from linckia_trainer.log.framing import Buffer
from linckia_trainer.log.objects import NoExclusiveCreate, ObjectInfo
from linckia_trainer.log.process import start_time, this_host, this_start_time

TEMPORARY = ".tmp"  # one folder below the root, so that a killed writer's leftovers are in nobody's way
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
_WRITE_BYTES = 64 << 20


class LocalFiles:
    """``root`` is made when the first object is written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        """Write the file unless it is there. A hard link is the only atomic create that also shows whole content."""
        temporary = self._write_temporary(data)
        try:
            return self._publish(temporary, key, exclusive=True)
        finally:
            temporary.unlink(missing_ok=True)

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        temporary = self._write_temporary(data)
        try:
            self._publish(temporary, key, exclusive=False)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def read_starts(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        return [self._read_start(key, num_bytes) for key in keys]

    def scan(self, prefix: str) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        for folder, folders, files in os.walk(self._path(prefix) if prefix else self.root):
            if Path(folder) == self.root and TEMPORARY in folders:
                folders.remove(TEMPORARY)
            for file in files:
                path = Path(folder, file)
                with contextlib.suppress(FileNotFoundError):  # deleted or moved while we look
                    stat = path.stat()
                    found[path.relative_to(self.root).as_posix()] = ObjectInfo(stat.st_size, stat.st_mtime)
        return found

    def info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        stat = path.stat()
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return ObjectInfo(stat.st_size, stat.st_mtime)

    def delete(self, key: str) -> None:
        """Remove a file or a folder with all below it, then the folders that became empty."""
        path = self._path(key)
        if path.is_dir():
            # renamed first: a folder vanishes at once, also for a reader and when we are killed in between
            aside = self._temporary()
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
                shutil.rmtree(aside)
        else:
            path.unlink(missing_ok=True)
        self._remove_empty(path.parent)

    def move(self, source: str, target: str) -> None:
        path, goal = self._path(source), self._path(target)
        goal.parent.mkdir(parents=True, exist_ok=True)
        path.rename(goal)
        _sync_folder(goal.parent)
        _sync_folder(path.parent)
        self._remove_empty(path.parent)

    def sweep(self) -> None:
        """Remove what killed writers of this host left behind; other hosts' writers cannot be judged from here."""
        for path in (self.root / TEMPORARY).glob("*"):
            match path.name.rsplit("~", 3):
                case [host, pid, started, _] if host == this_host() and start_time(int(pid)) != int(started):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / key

    def _read_start(self, key: str, num_bytes: int) -> bytes | None:
        try:
            with self._path(key).open("rb") as file:
                return file.read(num_bytes)
        except FileNotFoundError:
            return None

    def _temporary(self) -> Path:
        folder = self.root / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{this_host()}~{os.getpid()}~{this_start_time()}~{uuid.uuid4().hex}"

    def _write_temporary(self, data: Sequence[Buffer]) -> Path:
        path = self._temporary()
        try:
            with path.open("xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _publish(self, temporary: Path, key: str, exclusive: bool) -> bool:
        goal = self._path(key)
        while True:
            goal.parent.mkdir(parents=True, exist_ok=True)
            try:
                if exclusive:
                    os.link(temporary, goal)
                else:
                    temporary.replace(goal)
            except FileNotFoundError:
                if not temporary.exists():
                    raise
                continue  # a delete removed the empty folder between our two calls
            except FileExistsError:
                # over NFS the answer to a link that worked may be lost, and the repeated call finds our own link
                return temporary.stat().st_nlink == 2
            except OSError as error:
                if exclusive and error.errno in _NO_HARD_LINKS:
                    raise NoExclusiveCreate(
                        f"the folder's file system makes no hard links ({error.strerror})"
                    ) from error
                raise
            _sync_folder(goal.parent)
            return True

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or already gone: both are fine
                return
            folder = folder.parent


def _write_all(file: int, data: Sequence[Buffer]) -> None:
    """Large objects leave the page cache as they reach the disk: nobody reads a state soon, and gigabytes of fresh cache
    cost the processor more than the writing does, beside whoever generates meanwhile."""
    written = settled = 0
    for part in data:
        view = memoryview(part).cast("B")
        while view:
            count = os.write(file, view[:_WRITE_BYTES])
            view, written = view[count:], written + count
            if written - settled >= _WRITE_BYTES:
                os.fdatasync(file)
                os.posix_fadvise(file, settled, written - settled, os.POSIX_FADV_DONTNEED)
                settled = written


def _sync_folder(folder: Path) -> None:
    """Make a new name last a power cut."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # removed by a delete meanwhile, so there is nothing to keep
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
