"""One contract for every kind of place, then what only a folder or only a bad place does."""

import errno
import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from unit.log_builders import MemoryPlace, TwiceFileSystem

from linckia.api.errors import UserError
from linckia_trainer.log import local_files
from linckia_trainer.log.local_files import TEMPORARY, LocalFiles
from linckia_trainer.log.store import DiskFullError, Store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    fsspec.register_implementation("place", MemoryPlace, clobber=True)
    uris = {
        "folder": str(tmp_path / "run"),
        "file": f"file://{tmp_path}/run",
        "memory": f"place://{uuid.uuid4().hex}",
    }
    return Store(uris[request.param])


def test_put_get_exists_info(store: Store) -> None:
    assert not store.exists("log/1")
    store.put("log/1", b"one")
    store.put("log/1", [b"on", memoryview(b"e, again")])
    assert store.get("log/1") == b"one, again"
    assert store.exists("log/1")
    assert not store.exists("log")
    size, modified = store.info("log/1")
    assert size == 10
    assert modified > 1_000_000_000


def test_what_is_not_there_is_file_not_found(store: Store) -> None:
    calls: list[Callable[[str], Any]] = [store.get, store.info, lambda key: store.read_start(key, 4)]
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call("log/1")
    store.delete("log/1")
    assert store.list("log") == []


def test_put_if_absent_keeps_the_first(store: Store) -> None:
    assert store.put_if_absent("log/1", b"first")
    assert not store.put_if_absent("log/1", b"second")
    assert store.get("log/1") == b"first"


def test_of_many_writers_of_one_key_one_wins_and_its_bytes_are_there(store: Store) -> None:
    for round_number in range(10):
        barrier = threading.Barrier(8)

        def write(number: int, key: str = f"log/{round_number}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return store.put_if_absent(key, str(number).encode() * 1000)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(write, range(8)))
        assert won.count(True) == 1
        assert store.get(f"log/{round_number}") == str(won.index(True)).encode() * 1000


def test_list_is_recursive_sorted_and_by_folder(store: Store) -> None:
    for key in ("log/2", "log/10", "log/1.partial/1-0", "logs/1", "state/policy/1/1.1/0"):
        store.put(key, b"x")
    assert store.list("log") == store.list("log/") == ["log/1.partial/1-0", "log/10", "log/2"]
    assert store.list() == ["log/1.partial/1-0", "log/10", "log/2", "logs/1", "state/policy/1/1.1/0"]
    assert store.list("log/2") == []
    assert store.list("nothing") == []
    assert store.scan("log")["log/2"].size == 1


def test_read_starts(store: Store) -> None:
    store.put("a", b"0123456789")
    store.put("b", b"01")
    store.put("empty", b"")
    assert store.read_start("a", 4) == b"0123"
    assert store.read_starts(["a", "missing", "b", "empty"], 4) == [b"0123", None, b"01", b""]
    assert store.read_starts([], 4) == []


def test_delete_removes_a_key_or_a_folder_and_nothing_beside_it(store: Store) -> None:
    for key in ("log/1", "log/1.skip", "log/1.partial/1-0", "log/1.partial/1-1", "log/2"):
        store.put(key, b"x")
    store.delete("log/1")
    assert store.list() == ["log/1.partial/1-0", "log/1.partial/1-1", "log/1.skip", "log/2"]
    store.delete("log/1.partial/")
    assert store.list() == ["log/1.skip", "log/2"]


def test_move_renames_a_key_or_a_folder(store: Store) -> None:
    for key in ("log/1", "state/policy/1/1.1/0", "state/policy/1/1.1/1"):
        store.put(key, key.encode())
    store.move("log/1", "rewound/1/log/1")
    store.move("state/policy/1", "rewound/1/state/policy/1")
    assert store.list() == ["rewound/1/log/1", "rewound/1/state/policy/1/1.1/0", "rewound/1/state/policy/1/1.1/1"]
    assert store.get("rewound/1/log/1") == b"log/1"


def test_an_empty_key_deletes_and_moves_nothing(store: Store) -> None:
    store.put("log/1", b"x")
    with pytest.raises(AssertionError):
        store.delete("/")
    with pytest.raises(AssertionError):
        store.move("", "elsewhere")
    assert store.list() == ["log/1"]


def test_probe_leaves_nothing(store: Store) -> None:
    store.probe()
    assert store.list() == []


def test_a_store_pickles(store: Store) -> None:
    store.put("log/1", b"x")
    assert pickle.loads(pickle.dumps(store)).get("log/1") == b"x"


def test_a_file_is_seen_whole_or_not_at_all_while_it_is_replaced(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    contents = [bytes([letter]) * 50_000 for letter in b"ab"]
    store.put("state/0", contents[0])
    stop = threading.Event()

    def write() -> None:
        for number in range(100):
            store.put("state/0", [contents[number % 2][:20_000], contents[number % 2][20_000:]])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        assert store.get("state/0") in contents
        assert store.list() == ["state/0"]
    writer.join()


WRITER = """
import os, signal, sys
from linckia_trainer.log.store import Store
os.{call} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
Store(sys.argv[1]).{method}("log/1", b"half of it")
"""


@pytest.mark.parametrize(("call", "method"), [("link", "put_if_absent"), ("replace", "put"), ("fsync", "put")])
def test_a_writer_killed_before_its_file_has_a_name_leaves_nothing_to_see(
    tmp_path: Path, call: str, method: str
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", WRITER.format(call=call, method=method), str(tmp_path)], check=False, timeout=60
    )
    assert killed.returncode == -9
    store = Store(str(tmp_path))
    assert len(list((tmp_path / TEMPORARY).iterdir())) == 1  # it really died with its file written
    assert store.list() == []
    assert not store.exists("log/1")
    assert store.put_if_absent("log/1", b"whole")
    store.probe()
    assert list((tmp_path / TEMPORARY).iterdir()) == []
    assert store.get("log/1") == b"whole"


def test_a_large_object_is_whole_and_leaves_the_page_cache_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_WRITE_BYTES", 1000)
    left: list[tuple[int, int]] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda file, start, size, advice: (left.append((start, size)), advise(file, start, size, advice)),
    )
    data = [os.urandom(size) for size in (10, 2500, 0, 700, 1000)]
    Store(str(tmp_path)).put("state/0", data)
    assert (tmp_path / "state/0").read_bytes() == b"".join(data)
    assert left[0][0] == 0
    assert all(start + size == following for (start, size), (following, _) in pairwise(left))
    assert 4210 - 1000 < sum(left[-1]) <= 4210


def test_a_living_writers_file_is_not_swept(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    temporary = LocalFiles(tmp_path)._write_temporary([b"on its way"])
    store.probe()
    assert temporary.read_bytes() == b"on its way"


def test_a_link_that_worked_but_was_answered_exists_counts_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: the answer to the first link was lost, the repeated call finds the name taken, by itself."""
    link = os.link

    def link_twice(*args: Any) -> None:
        link(*args)
        link(*args)

    monkeypatch.setattr(os, "link", link_twice)
    store = Store(str(tmp_path))
    assert store.put_if_absent("log/1", b"x")
    assert not store.put_if_absent("log/1", b"y")


def test_deleting_leaves_no_empty_folders_but_the_run_itself(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("state/policy/00000001/1.1/0", b"x")
    store.put("log/00000001.partial/1-0", b"x")
    store.delete("state/policy/00000001/1.1/0")
    store.delete("log/00000001.partial")
    assert [path.name for path in tmp_path.iterdir()] == [TEMPORARY]


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    store.put("log/1", b"before")

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    for call in (store.put, store.put_if_absent):
        with pytest.raises(DiskFullError, match=r"run\.dir.*no space left while writing log/2"):
            call("log/2", b"x" * 1000)
    assert store.list() == ["log/1"]
    assert list((tmp_path / TEMPORARY).iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"run\.dir.*may not be read or written.*owner and rights"):
        Store(str(tmp_path / "run")).probe()


def test_a_folder_below_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"run\.dir"):
        Store(str(tmp_path / "file" / "run")).probe()


def test_an_unknown_kind_of_place_is_said() -> None:
    with pytest.raises(UserError, match=r"run\.dir = 'nowhere://x'.*Protocol not known: nowhere"):
        Store("nowhere://x")


class CachingFileSystem(MemoryFileSystem):
    """Goes on showing what it has shown once, until it is told to look again."""

    protocol = "caching"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    seen: dict[str, Any] = {}  # noqa: RUF012

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()

    def find(self, path: str, **kwargs: Any) -> Any:
        return self.seen.setdefault(path, super().find(path, **kwargs))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.seen.setdefault(f"info {path}", super().info(path, **kwargs))


def test_listings_of_a_filesystem_that_caches_are_fresh() -> None:
    fsspec.register_implementation("caching", CachingFileSystem, clobber=True)
    store = Store(f"caching://{uuid.uuid4().hex}")
    for number in range(3):
        assert len(store.list("log")) == number
        store.put(f"log/{number}", b"x")
        store.put("grows", b"x" * number)
        assert store.info("grows")[0] == number


class UnlistedFileSystem(MemoryFileSystem):
    """Cannot list one folder now; fsspec's own ``find`` would leave it out and say nothing."""

    protocol = "unlisted"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    fails = False
    find = AbstractFileSystem.find  # as most filesystems have it

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if self.fails and path.rstrip("/").endswith("/00000002.partial"):
            raise OSError(errno.EIO, "no answer")
        return super().ls(path, detail, **kwargs)


def test_a_folder_that_cannot_be_listed_is_a_failure_and_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("unlisted", UnlistedFileSystem, clobber=True)
    store = Store(f"unlisted://{uuid.uuid4().hex}")
    keys = ["log/00000001", "log/00000002.partial/1-0", "state/policy/00000001/1.1/0"]
    for key in keys:
        store.put(key, b"x")
    assert store.list() == keys
    monkeypatch.setattr(UnlistedFileSystem, "fails", True)
    with pytest.raises(OSError, match="no answer"):
        store.list("log")
    assert store.list("state") == keys[2:]


class LookThenWriteFileSystem(MemoryFileSystem):
    """Looks, then writes: right as long as nobody else does the same at one time."""

    protocol = "lookthenwrite"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    looked = threading.Barrier(8)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        if path.endswith("race"):
            self.looked.wait(timeout=30)
        super().pipe_file(path, value, mode="overwrite", **kwargs)


class NoCreateFileSystem(MemoryFileSystem):
    protocol = "nocreate"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create":
            raise NotImplementedError("create")
        super().pipe_file(path, value, mode=mode, **kwargs)


BAD_PLACES = [
    (TwiceFileSystem, "created twice"),
    (LookThenWriteFileSystem, "8 of 8 writers created one key"),
    (NoCreateFileSystem, "refuses mode='create'"),
]


@pytest.mark.parametrize(("filesystem", "reason"), BAD_PLACES)
def test_a_place_that_is_no_lock_is_refused_unless_there_is_a_single_writer(filesystem: Any, reason: str) -> None:
    fsspec.register_implementation(filesystem.protocol, filesystem, clobber=True)
    uri = f"{filesystem.protocol}://{uuid.uuid4().hex}"
    with pytest.raises(UserError, match=reason) as caught:
        Store(uri).probe()
    assert caught.value.field == "storage.single_writer"
    assert "set storage.single_writer to true" in caught.value.next_step

    trusted = Store(uri, single_writer=True)
    trusted.probe()
    assert trusted.put_if_absent("log/1", b"first")
    assert not trusted.put_if_absent("log/1", b"second")
    assert trusted.get("log/1") == b"first"


def test_a_folder_without_hard_links_is_refused_unless_there_is_a_single_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UserError, match="no hard links"):
        Store(str(tmp_path)).probe()
    trusted = Store(str(tmp_path), single_writer=True)
    trusted.probe()
    assert trusted.put_if_absent("log/1", b"first")
    assert not trusted.put_if_absent("log/1", b"second")
