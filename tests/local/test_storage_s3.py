"""The log and the states over the real S3 protocol: moto's server, s3fs as the client."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local.s3_server import s3_server
from s3fs.core import S3File, S3FileSystem
from unit.log_builders import ORIGIN, flip, header, make_log, payload, save_state

from linckia.api.errors import UserError
from linckia_trainer.log import attempts, objects, spool
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.store import Store
from linckia_trainer.state.aside import set_aside
from linckia_trainer.state.choose import newest_valid
from linckia_trainer.state.fork import find_fork_point, fork
from linckia_trainer.state.format import StateHeader, read_state, write_state
from linckia_trainer.state.rewind import rewind
from linckia_trainer.state.tiers import Tier, list_states

BUCKET = "linckia-test"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with s3_server() as endpoint:
        found = {"endpoint_url": endpoint, "key": "test", "secret": "test"}
        S3FileSystem(**found, skip_instance_cache=True).mkdir(BUCKET)
        yield found


@pytest.fixture
def store(options: dict[str, Any], request: pytest.FixtureRequest) -> Store:
    return Store(f"s3://{BUCKET}/runs/{request.node.name}", options)


def test_contract(store: Store) -> None:
    store.probe()
    assert store.list() == []
    assert store.put_if_absent("log/1", [b"fi", memoryview(b"rst")])
    assert not store.put_if_absent("log/1", b"second")
    store.put("log/2", b"one")
    store.put("log/2", b"two, longer")
    store.put("log/2.partial/1-0", b"x")
    store.put("log/empty", b"")
    assert store.get("log/1") == b"first"
    assert store.exists("log/1")
    assert not store.exists("log")
    assert not store.exists("log/3")
    size, modified = store.info("log/2")
    assert size == 11
    assert modified > 1_000_000_000
    assert store.list("log") == ["log/1", "log/2", "log/2.partial/1-0", "log/empty"]
    assert store.list("log/2") == []
    assert store.read_starts(["log/2", "log/3", "log/1", "log/empty"], 4) == [b"two,", None, b"firs", b""]
    with pytest.raises(FileNotFoundError):
        store.get("log/3")
    store.delete("log/2")
    store.delete("log/2")
    assert store.list("log") == ["log/1", "log/2.partial/1-0", "log/empty"]
    store.move("log", "rewound/1/log")
    assert store.list() == ["rewound/1/log/1", "rewound/1/log/2.partial/1-0", "rewound/1/log/empty"]
    store.delete("rewound")
    assert store.list() == []


def test_listings_are_never_stale(store: Store) -> None:
    other = Store(store.uri, store.options)
    for number in range(3):
        assert len(store.list("log")) == number
        assert not store.exists(f"log/{number}")
        other.put(f"log/{number}", b"x")
        assert store.exists(f"log/{number}")


def test_of_many_writers_of_one_key_one_wins(store: Store, options: dict[str, Any]) -> None:
    stores = [Store(store.uri, options) for _ in range(4)]
    for round_number in range(4):
        barrier = threading.Barrier(8)

        def write(number: int, key: str = f"log/{round_number}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return stores[number % 4].put_if_absent(key, str(number).encode() * 100)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(write, range(8)))
        assert won.count(True) == 1
        assert store.get(f"log/{round_number}") == str(won.index(True)).encode() * 100


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Objects are sent in parts of 5 MiB, the least that S3 takes."""
    monkeypatch.setattr(objects, "_STREAM_BYTES", 5 << 20)
    return 5 << 20


def test_an_object_too_large_to_be_sent_at_once(store: Store, small_parts: int) -> None:
    part = memoryview(bytes(small_parts) + b"odd")
    assert store.put_if_absent("state/0", [b"start", part, part, b"end"])
    assert not store.put_if_absent("state/0", [b"other", part, part])
    assert store.info("state/0")[0] == 2 * len(part) + 8
    data = store.get("state/0")
    assert data[:5] == b"start"
    assert data[-6:] == b"oddend"
    store.put("state/0", [part, part])
    assert store.info("state/0")[0] == 2 * len(part)


def test_a_large_object_whose_sending_fails_is_not_to_be_seen(
    store: Store, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = S3File.write, 2

    def fail_at_the_third(self: S3File, data: memoryview) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ConnectionResetError("the network went away")
        return write(self, data)

    monkeypatch.setattr(S3File, "write", fail_at_the_third)
    for call in (store.put, store.put_if_absent):
        left = 2
        with pytest.raises(ConnectionResetError):
            call("state/0", bytes(4 * small_parts))
        assert store.list() == []


def test_fresh_moves_a_run_aside(store: Store, tmp_path: Path) -> None:
    make_log(store, 2)
    before = {key: store.get(key) for key in store.list()}
    assert set_aside(store, tmp_path / "none") == f"{store.uri.rpartition('/')[2]}.old-1"
    aside = Store(f"{store.uri}.old-1", store.options)
    assert {key: aside.get(key) for key in aside.list()} == before
    assert store.list() == []


def test_the_log_with_a_skip_a_spool_and_two_writers(store: Store) -> None:
    log = make_log(store, 3)
    log.mark_skip(3, "nan")
    slow = RunLog(store, ORIGIN)
    record = log.commit(4, payload(4), attempt=2)
    assert slow.commit(4, payload(4, variant=1), attempt=1).log_hash == record.log_hash
    store.put("log/00000005.partial/2-0", b"not a spool object")
    reopened = RunLog(store, ORIGIN)
    assert reopened.verify(0, deep=True) == []
    assert reopened.skipped(3)
    assert reopened.read(2).header == header(2)
    found, warnings = spool.read(store, 5)
    assert found == {}
    assert len(warnings) == 1
    spool.clear(store, 5)
    assert store.list("log") == [f"log/0000000{step}" for step in (1, 2, 3)] + ["log/00000003.skip", "log/00000004"]


def test_attempts_and_generations(store: Store) -> None:
    assert attempts.claim(store, {"host": "elsewhere"}) == 1
    assert attempts.claim(store, {"host": "elsewhere"}) == 2
    assert attempts.superseded(store, 1)
    assert attempts.claim_generation(store, "policy") == 1
    assert attempts.claim_generation(store, "policy") == 2


def test_states_are_saved_chosen_rewound_and_forked(store: Store, options: dict[str, Any]) -> None:
    log = make_log(store, 4)
    for step in (0, 2, 4):
        save_state(store, log, "policy", step, world=2)
    tiers = [Tier("run_directory", store)]
    flip(store, "state/policy/00000004/1.1/1", 50)
    choice = newest_valid(list_states(tiers, "policy", "first"), 2, log.head(), log.hash_at)
    assert choice is not None
    assert choice.step == 2
    _, files = read_state(store, choice.refs[1].key)
    assert bytes(next(files)[1]) == b"policy 2 1" * 50

    target = Store(store.uri + "-fork", options)
    assert fork(target, "second", "e" * 64, find_fork_point(store, "first", log, {"policy": 2}), store).step == 2
    assert len(list_states([Tier("run_directory", target)], "policy", "second")) == 2

    rewind(store, None, 3, {"policy": 2}, log=log, live=False)
    assert log.head() == 3
    assert store.list("rewound/1") == [
        "rewound/1/log/00000004", "rewound/1/rewind.json",
        "rewound/1/state/policy/00000004/1.1/0", "rewound/1/state/policy/00000004/1.1/1",
    ]  # fmt: skip


def test_a_state_is_written_over_s3_from_views(store: Store) -> None:
    state = StateHeader("first", "critic", 1, 0, 1, "ab", 1, 1)
    key = write_state(store, state, [("a.pt", memoryview(bytearray(b"x" * 1000))), ("empty", b"")])
    got, files = read_state(store, key)
    assert got == state
    assert [(name, len(content)) for name, content in files] == [("a.pt", 1000), ("empty", 0)]


def test_a_missing_bucket_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="bucket or folder does not exist") as caught:
        Store("s3://no-such-bucket/runs/first", options).probe()
    assert caught.value.field == "run.dir"
    assert caught.value.value == "s3://no-such-bucket/runs/first"


@pytest.fixture
def checked_keys(options: dict[str, Any]) -> Iterator[None]:
    """The server looks at who asks; usually it lets everyone in."""
    for count in (0, 10**9):
        httpx.post(f"{options['endpoint_url']}/moto-api/reset-auth", content=str(count)).raise_for_status()
        if count == 0:
            yield


@pytest.mark.usefixtures("checked_keys")
def test_a_wrong_key_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"run\.dir.*may not be read or written.*key and secret in storage\.options"):
        Store(f"s3://{BUCKET}/runs/first", {**options, "key": "AKIAWRONG"}).probe()


def test_a_server_that_does_not_answer_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = {
        "endpoint_url": closed, "key": "test", "secret": "test",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }  # fmt: skip
    with pytest.raises(UserError, match=r"run\.dir.*cannot be reached.*endpoint_url"):
        Store(f"s3://{BUCKET}/runs/first", options).probe()


def test_missing_credentials_are_said(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without = {"endpoint_url": options["endpoint_url"]}
    with pytest.raises(UserError, match=r"run\.dir.*credentials.*storage\.options"):
        Store(f"s3://{BUCKET}/runs/first", without).probe()
