import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from unit.log_builders import local_store

from linckia.api.errors import LiveRunError
from linckia_trainer.log import attempts
from linckia_trainer.log.attempts import AttemptInfo
from linckia_trainer.log.process import start_time, this_host, this_start_time
from linckia_trainer.log.store import Store


def mine(**changes: Any) -> dict[str, Any]:
    return {"host": this_host(), "pid": os.getpid(), "start_time": this_start_time(), **changes}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def test_attempts_count_from_one_and_keep_what_they_said(store: Store) -> None:
    assert attempts.latest(store) is None
    said = {"ray_address": "10.0.0.1:6379", "api_address": "10.0.0.1:8470", "config": {"run": {"name": "first"}}}
    assert attempts.claim(store, mine(pid=0, **said)) == 1
    assert attempts.claim(store, mine(pid=0)) == 2
    first = attempts.read(store, 1)
    assert first.config == {"run": {"name": "first"}}
    assert (first.ray_address, first.api_address, first.host) == ("10.0.0.1:6379", "10.0.0.1:8470", this_host())
    newest = attempts.latest(store)
    assert newest is not None
    assert newest.attempt == 2


def test_numbers_are_ordered_as_numbers(store: Store) -> None:
    for _ in range(11):
        attempts.claim(store, {})
    assert attempts.numbers(store) == list(range(1, 12))
    assert attempts.superseded(store, 10)
    assert not attempts.superseded(store, 11)


def test_a_live_run_is_refused_unless_taken_over(store: Store) -> None:
    attempts.claim(store, mine())
    with pytest.raises(LiveRunError, match=rf"attempt 1 of this run is alive: process {os.getpid()} on .*--takeover"):
        attempts.claim(store, mine())
    assert attempts.numbers(store) == [1]
    assert not attempts.superseded(store, 1)
    assert attempts.claim(store, mine(), takeover=True) == 2
    assert attempts.superseded(store, 1)


def test_an_attempt_that_ended_blocks_nobody_and_its_first_word_stands(store: Store) -> None:
    attempts.claim(store, mine())
    assert attempts.outcome(store, 1) is None
    attempts.end(store, 1, "failed", cause="reward raised ValueError", fingerprint="reward/score/ValueError")
    attempts.end(store, 1, "finished")
    ended = attempts.outcome(store, 1)
    assert ended is not None
    assert (ended.outcome, ended.cause, ended.fingerprint) == (
        "failed", "reward raised ValueError", "reward/score/ValueError",
    )  # fmt: skip
    assert attempts.claim(store, mine()) == 2
    assert attempts.numbers(store) == [1, 2]


def test_a_killed_process_is_dead_at_once(store: Store) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    info = AttemptInfo(1, this_host(), process.pid, start_time(process.pid) or 0)
    assert attempts.is_alive(info)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped: a zombie
    assert not attempts.is_alive(info)
    process.communicate()
    assert not attempts.is_alive(info)


def test_a_pid_used_again_is_another_process() -> None:
    assert attempts.is_alive(AttemptInfo(1, this_host(), os.getpid(), this_start_time()))
    assert not attempts.is_alive(AttemptInfo(1, this_host(), os.getpid(), this_start_time() - 1))


def test_another_hosts_attempt_is_as_alive_as_its_beacon() -> None:
    elsewhere = AttemptInfo(1, "another-host", os.getpid(), this_start_time(), ray_address="10.0.0.1:6379")
    assert not attempts.is_alive(elsewhere)
    assert attempts.is_alive(elsewhere, lambda info: info.ray_address == "10.0.0.1:6379")
    assert not attempts.is_alive(elsewhere, lambda _: False)


SIGNS = count(1)


def watched(store: Store, attempt: int, signs_at: set[int]) -> tuple[list[float], Callable[[float], None]]:
    """A clock that nobody waits for: the attempt gives a sign in the waits of these numbers."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) in signs_at:
            store.put(f"attempts/{attempt}.sign", b'{"time": %d}' % next(SIGNS))

    return waits, sleep


@pytest.mark.parametrize(("signs_at", "live"), [({2}, True), ({attempts.LOOKS}, True), (set(), False)])
def test_another_hosts_attempt_that_gives_signs_is_alive(store: Store, signs_at: set[int], live: bool) -> None:
    attempts.claim(store, {"host": "another-host", "pid": 1})
    attempts.give_sign(store, 1)
    waits, sleep = watched(store, 1, signs_at)
    assert attempts.is_live(store, attempts.read(store, 1), sleep=sleep) == live
    assert len(waits) == min(signs_at, default=attempts.LOOKS)
    assert 6 <= sum([attempts.SIGN_SECONDS / 2] * attempts.LOOKS) <= 15
    waits, sleep = watched(store, 1, signs_at)
    if live:
        with pytest.raises(LiveRunError, match="another-host"):
            attempts.claim(store, mine(), sleep=sleep)
    else:  # it blocks nobody, and who has looked need not look again
        assert attempts.claim(store, mine(), sleep=sleep, seen_dead=1) == 2
        assert waits == []
    assert not attempts.superseded(store, attempts.numbers(store)[-1])  # a sign is no attempt


def test_nobody_waits_for_who_has_ended_or_can_be_seen(store: Store) -> None:
    def never(seconds: float) -> None:
        pytest.fail("it waits")

    attempts.claim(store, {"host": "another-host", "pid": 1})
    attempts.end(store, 1, "stopped")
    assert not attempts.is_live(store, attempts.read(store, 1), sleep=never)
    attempts.claim(store, mine(start_time=1))
    assert not attempts.is_live(store, attempts.read(store, 2), sleep=never)
    store.put("attempts/3", b"damaged")
    assert not attempts.is_live(store, attempts.read(store, 3), sleep=never)


def test_a_damaged_claim_blocks_nobody_and_keeps_its_number(store: Store) -> None:
    store.put("attempts/3", b"{ not json")
    assert attempts.latest(store) == AttemptInfo(3)
    assert attempts.claim(store, mine()) == 4


def test_a_claim_whose_answer_was_lost_is_still_ours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Store.put_if_absent

    def answer_lost(self: Store, key: str, data: Any) -> bool:
        create(self, key, data)
        return create(self, key, data)

    monkeypatch.setattr(Store, "put_if_absent", answer_lost)
    assert attempts.claim(store, mine()) == 1
    assert attempts.numbers(store) == [1]


def test_of_many_that_start_at_once_one_runs(store: Store) -> None:
    barrier = threading.Barrier(6)

    def start(_: int) -> int:
        barrier.wait()
        try:
            return attempts.claim(store, mine())
        except LiveRunError:
            return 0

    with ThreadPoolExecutor(6) as pool:
        claimed = list(pool.map(start, range(6)))
    assert sorted(claimed) == [0, 0, 0, 0, 0, 1]


def test_takeovers_at_once_get_numbers_of_their_own(store: Store) -> None:
    barrier = threading.Barrier(6)

    def start(_: int) -> int:
        barrier.wait()
        return attempts.claim(store, mine(), takeover=True)

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(start, range(6))) == [1, 2, 3, 4, 5, 6]


def test_generations_count_for_each_group(store: Store) -> None:
    assert [attempts.claim_generation(store, "policy") for _ in range(11)] == list(range(1, 12))
    assert attempts.claim_generation(store, "rollout-1", {"attempt": 1}) == 1
    assert attempts.claim_generation(store, "rollout-10") == 1
    store.put("generations/policy/11.pids", b"[]")
    assert attempts.claim_generation(store, "policy") == 12
