import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from unit.log_builders import ORIGIN, CountingStore, flip, header, local_store, make_log, payload

from linckia.api.errors import DamagedError
from linckia_trainer.log import framing
from linckia_trainer.log.chain import Record, RunLog, origin_hash, record_key, skip_hash, skip_key
from linckia_trainer.log.records import encode
from linckia_trainer.log.store import Store


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def test_origin_depends_on_values_and_not_on_their_order() -> None:
    first = origin_hash({"run": {"seed": 0}, "clip": 0.2}, {"model": "ab"})
    assert first == origin_hash({"clip": 0.2, "run": {"seed": 0}}, {"model": "ab"})
    assert len({first, origin_hash({"run": {"seed": 1}, "clip": 0.2}, {"model": "ab"}),
                origin_hash({"run": {"seed": 0}, "clip": 0.2}, {"model": "ac"})}) == 3  # fmt: skip


def test_an_empty_log(store: Store) -> None:
    log = RunLog(store, ORIGIN)
    assert log.head() == 0
    assert log.log_hash(0) == ORIGIN
    assert log.verify(0) == []
    with pytest.raises(KeyError):
        log.log_hash(1)
    with pytest.raises(KeyError):
        log.read(1)


def test_records_chain_by_the_documented_hash(store: Store) -> None:
    log = make_log(store, 3)
    first = sha256(ORIGIN.encode() + payload(1))
    second = sha256(first.encode() + payload(2))
    assert [log.log_hash(step) for step in range(3)] == [ORIGIN, first, second]
    assert store.list() == [record_key(1), record_key(2), record_key(3)]
    record = RunLog(store, ORIGIN).read(2)
    assert (record.step, record.previous, record.log_hash, record.skipped) == (2, first, second, False)
    assert record.header == header(2)
    assert_array_equal(record.arrays["tokens"], np.arange(12, dtype=np.int32).reshape(3, 4) + 200)


def test_attempt_and_extra_are_outside_the_hash(store: Store, tmp_path: Path) -> None:
    log, other = RunLog(store, ORIGIN), RunLog(Store(str(tmp_path / "other")), ORIGIN)
    log.commit(1, payload(1), attempt=1, extra={"seconds": 1.5})
    other.commit(1, payload(1), attempt=9)
    assert log.log_hash(1) == other.log_hash(1)
    found = framing.read_header(store.get(record_key(1)))
    assert found["attempt"] == 1
    assert found["extra"] == {"seconds": 1.5}


def test_a_step_that_does_not_follow_the_head_is_refused(store: Store) -> None:
    log = make_log(store, 2)
    for step in (1, 2, 4):
        with pytest.raises(ValueError, match="does not follow the head, 2"):
            log.commit(step, payload(step), attempt=1)


def test_whoever_finds_the_record_there_takes_it_and_drops_their_own(store: Store) -> None:
    slow = make_log(store, 1)
    fast = RunLog(store, ORIGIN)
    theirs = fast.commit(2, payload(2, variant=7), attempt=2)
    got = slow.commit(2, payload(2), attempt=1)
    assert got.log_hash == theirs.log_hash == slow.log_hash(2)
    assert_array_equal(got.arrays["tokens"], theirs.arrays["tokens"])
    assert slow.head() == 2


def test_of_racing_writers_one_record_stays_and_all_agree_on_it(store: Store) -> None:
    logs = [RunLog(store, ORIGIN) for _ in range(6)]
    barrier = threading.Barrier(6)

    def write(number: int) -> list[Record]:
        records = []
        for step in range(1, 6):
            barrier.wait()
            records.append(logs[number].commit(step, payload(step, variant=number), attempt=number))
        return records

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(write, range(6)))
    for of_one_step in zip(*results, strict=True):
        assert len({record.log_hash for record in of_one_step}) == 1
        assert len({record.arrays["tokens"].tobytes() for record in of_one_step}) == 1
    assert RunLog(store, ORIGIN).verify(0, deep=True) == []


def test_a_record_there_that_does_not_chain_stops_the_run(store: Store, tmp_path: Path) -> None:
    log = make_log(store, 1)
    other = make_log(Store(str(tmp_path / "other")), 2, origin="f" * 64)
    store.put(record_key(2), other.store.get(record_key(2)))
    with pytest.raises(DamagedError, match=r"does not follow log/00000001.*linckia checkpoints rewind .*/run --to 1"):
        log.commit(2, payload(2), attempt=1)


def test_a_damaged_record_there_stops_the_run(store: Store) -> None:
    log = make_log(store, 1)
    make_log_of = RunLog(store, ORIGIN)
    make_log_of.commit(2, payload(2), attempt=1)
    flip(store, record_key(2), -1)
    with pytest.raises(DamagedError, match=r"log/00000002.*payload.*--to 1"):
        log.commit(2, payload(2), attempt=1)


# Skip marks


def test_a_mark_at_the_head_counts_and_the_next_record_goes_on_from_it(store: Store) -> None:
    log = make_log(store, 2)
    trained = log.log_hash(2)
    assert log.mark_skip(2, "loss is nan") == sha256(trained.encode() + b"skip") == skip_hash(trained)
    record = log.read(2)
    assert record.skipped
    assert record.log_hash == skip_hash(trained)
    assert record.carried().kl_coefficient == header(2).kl_coefficient
    log.commit(3, payload(3), attempt=1)
    reopened = RunLog(store, ORIGIN)
    assert reopened.log_hash(2) == skip_hash(trained)
    assert reopened.skipped(2)
    assert not reopened.skipped(1)
    assert not reopened.skipped(3)
    assert reopened.verify(0, deep=True) == []
    assert reopened.read(3).previous == skip_hash(trained)


def test_a_mark_counts_for_nothing_once_a_record_went_on_without_it(store: Store) -> None:
    log, zombie = make_log(store, 2), RunLog(store, ORIGIN)
    trained = log.log_hash(2)
    log.commit(3, payload(3), attempt=2)
    assert zombie.mark_skip(2, "too late") == trained
    assert not zombie.skipped(2)
    reopened = RunLog(store, ORIGIN)
    assert reopened.marked() == [2]
    assert reopened.log_hash(2) == trained
    assert not reopened.read(2).skipped
    assert reopened.verify(0, deep=True) == []


def test_commit_sees_a_mark_that_another_wrote(store: Store) -> None:
    log, other = make_log(store, 2), RunLog(store, ORIGIN)
    marked = other.mark_skip(2, "loss is inf")
    assert log.commit(3, payload(3), attempt=1).previous == marked
    assert log.skipped(2)


def test_a_mark_that_lands_between_look_and_write_is_settled_by_the_record(store: Store) -> None:
    """A zombie's record of step 3 ignores the mark; who comes second follows the record and not the mark."""
    log, zombie = make_log(store, 2), RunLog(store, ORIGIN)
    trained = log.log_hash(2)
    zombie.commit(3, payload(3, variant=1), attempt=1)
    store.put_if_absent(skip_key(2), b"{}")
    record = log.commit(3, payload(3), attempt=2)
    assert record.previous == trained == log.log_hash(2)
    assert not log.skipped(2)


def test_refresh_sees_marks_and_records_of_others(store: Store) -> None:
    log, other = make_log(store, 1), RunLog(store, ORIGIN)
    other.commit(2, payload(2), attempt=2)
    other.mark_skip(2, "nan")
    assert log.head() == 1
    log.refresh()
    assert log.head() == 2
    assert log.log_hash(2) == other.log_hash(2)


def test_only_a_record_can_be_skipped(store: Store) -> None:
    with pytest.raises(ValueError, match="step 3 has no record to skip"):
        make_log(store, 2).mark_skip(3, "nan")


# Damage


def damage_header(store: Store, step: int) -> None:
    flip(store, record_key(step), 50)


def damage_payload(store: Store, step: int) -> None:
    flip(store, record_key(step), -1)


def cut_payload(store: Store, step: int) -> None:
    store.put(record_key(step), store.get(record_key(step))[:-5])


def cut_header(store: Store, step: int) -> None:
    store.put(record_key(step), store.get(record_key(step))[:60])


def empty(store: Store, step: int) -> None:
    store.put(record_key(step), b"")


def remove(store: Store, step: int) -> None:
    store.delete(record_key(step))


def replace(store: Store, step: int) -> None:
    """A whole record, of another step."""
    store.put(record_key(step), store.get(record_key(1)))


def replace_by_other_history(store: Store, step: int) -> None:
    other = Store(store.uri + "-other")
    make_log(other, step, origin="f" * 64)
    store.put(record_key(step), other.get(record_key(step)))


DAMAGES = [damage_header, damage_payload, cut_payload, cut_header, empty, remove, replace, replace_by_other_history]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_a_needed_record_names_the_rewind(store: Store, damage: Any) -> None:
    make_log(store, 5)
    damage(store, 3)
    with pytest.raises(DamagedError, match=r"log/00000003.*linckia checkpoints rewind .*/run --to 2"):
        RunLog(store, ORIGIN).verify(needed_after=2)


@pytest.mark.parametrize("damage", DAMAGES[:-1])
def test_damage_that_no_group_needs_is_a_warning(store: Store, damage: Any) -> None:
    expected = make_log(store, 5).log_hash(3)
    damage(store, 3)
    log = RunLog(store, ORIGIN)
    warnings = log.verify(needed_after=3, deep=True)
    assert [warning.split(":")[0] for warning in warnings] == ["log/00000003"]
    assert log.head() == 5
    assert log.log_hash(3) == expected  # record 4 still says it: a state of step 3 can be judged
    assert log.commit(6, payload(6), attempt=2).step == 6


def test_a_record_cut_off_is_seen_by_its_size_alone(store: Store) -> None:
    make_log(store, 5)
    cut_payload(store, 3)
    (warning,) = RunLog(store, ORIGIN).verify(needed_after=4)
    assert "log/00000003: cut off" in warning


def test_a_changed_payload_that_no_group_needs_is_not_even_read(store: Store) -> None:
    make_log(store, 5)
    damage_payload(store, 3)
    assert RunLog(store, ORIGIN).verify(needed_after=3) == []
    with pytest.raises(DamagedError, match="--to 2"):
        RunLog(store, ORIGIN).read(3)


def test_the_head_is_needed_even_if_all_groups_have_applied_it(store: Store) -> None:
    make_log(store, 3)
    damage_payload(store, 3)
    with pytest.raises(DamagedError, match="--to 2"):
        RunLog(store, ORIGIN).verify(needed_after=3)


def test_two_damages_are_told_from_the_first_needed_one(store: Store) -> None:
    make_log(store, 6)
    cut_payload(store, 4)
    cut_payload(store, 5)
    with pytest.raises(DamagedError, match="--to 3"):
        RunLog(store, ORIGIN).verify(needed_after=2)
    with pytest.raises(DamagedError, match="--to 4"):
        RunLog(store, ORIGIN).verify(needed_after=4)


def test_a_log_of_another_origin_does_not_chain(store: Store) -> None:
    make_log(store, 2)
    with pytest.raises(DamagedError, match="config, model or data were others"):
        RunLog(store, "f" * 64).verify(0)


def test_a_tool_without_the_origin_takes_it_from_the_first_record(store: Store) -> None:
    make_log(store, 2)
    log = RunLog(store, None)
    assert log.log_hash(0) == ORIGIN
    assert log.verify(0, deep=True) == []


def test_prune_takes_records_and_their_marks_and_never_the_head(store: Store) -> None:
    log = make_log(store, 3)
    log.mark_skip(3, "nan")
    for step in (4, 5):
        log.commit(step, payload(step), attempt=1)
    expected = log.log_hash(3)
    log.prune(range(1, 6))
    assert store.list() == [record_key(5)]
    log.commit(6, payload(6), attempt=1)
    reopened = RunLog(store, ORIGIN)
    assert reopened.verify(needed_after=4) == []
    assert reopened.hash_at(3) is None
    assert reopened.log_hash(4) == log.read(5).previous
    assert expected != ORIGIN
    with pytest.raises(DamagedError, match=r"log/00000004.*missing"):
        reopened.verify(needed_after=3)


def test_opening_a_long_log_reads_names_and_headers_only(tmp_path: Path) -> None:
    log = RunLog(Store(str(tmp_path)), ORIGIN)
    for step in range(1, 201):
        log.commit(step, encode(header(step), {"tokens": np.full(20_000, step, np.int32)}), attempt=1)
    store = CountingStore(str(tmp_path))
    reopened = RunLog(store, ORIGIN)
    assert reopened.verify(needed_after=199) == []
    assert store.calls == {"scan": 1, "read_starts": 1, "get": 1}  # the head alone is read whole
    assert store.bytes_read < 200 * framing.FIRST_READ_BYTES + 81_000

    store.calls.clear()
    reopened.refresh()
    assert store.calls == {"scan": 1, "read_starts": 1}
    store.calls.clear()
    reopened.commit(201, payload(201), attempt=2)
    assert store.calls == {"info": 1}  # is there a skip mark
