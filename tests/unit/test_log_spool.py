from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from unit.log_builders import flip, local_store

from linckia_trainer.experience.trajectory import Trajectory
from linckia_trainer.log import spool
from linckia_trainer.log.store import Store


def trajectory(position: int, sample: int, answer: int = 3, finish: str = "stop", token: int = 5) -> Trajectory:
    return Trajectory(
        position=position,
        sample=sample,
        prompt_tokens=np.arange(position % 4 + 1, dtype=np.int32),
        answer_tokens=np.full(answer, token, np.int32),
        log_probs=np.linspace(-1, 0, answer, dtype=np.float32),
        finish=finish,
        weight_step=position % 1000,
        policy_generation=2,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def assert_same(got: Trajectory, expected: Trajectory) -> None:
    for name in ("prompt_tokens", "answer_tokens", "log_probs"):
        assert getattr(got, name).dtype == getattr(expected, name).dtype
        assert_array_equal(getattr(got, name), getattr(expected, name))
    for name in ("key", "finish", "weight_step", "policy_generation"):
        assert getattr(got, name) == getattr(expected, name)


def test_trajectories_come_back_from_several_batches(store: Store) -> None:
    batches = [
        [trajectory(2**40, 0), trajectory(1, 1, answer=0, finish="length")],
        [trajectory(2, 0, answer=1)],
        [],
    ]
    for n, batch in enumerate(batches):
        assert spool.write(store, 4, attempt=1, n=n, trajectories=batch)
    assert store.list() == [f"log/00000004.partial/1-{n}" for n in range(3)]
    found, warnings = spool.read(store, 4)
    assert warnings == []
    assert found.keys() == {(2**40, 0), (1, 1), (2, 0)}
    for expected in batches[0] + batches[1]:
        assert_same(found[expected.key], expected)


def test_of_two_with_one_key_the_lower_attempt_and_number_win(store: Store) -> None:
    spool.write(store, 1, attempt=10, n=0, trajectories=[trajectory(0, 0, token=10), trajectory(1, 0, token=10)])
    spool.write(store, 1, attempt=2, n=11, trajectories=[trajectory(0, 0, token=211), trajectory(2, 0, token=211)])
    spool.write(store, 1, attempt=2, n=9, trajectories=[trajectory(0, 0, token=209)])
    found, _ = spool.read(store, 1)
    assert {key: int(one.answer_tokens[0]) for key, one in found.items()} == {(0, 0): 209, (1, 0): 10, (2, 0): 211}


def test_a_damaged_batch_is_left_out_with_a_warning(store: Store) -> None:
    spool.write(store, 1, 1, 0, [trajectory(0, 0, token=1)])
    spool.write(store, 1, 1, 1, [trajectory(1, 0)])
    spool.write(store, 1, 2, 0, [trajectory(0, 0, token=2)])
    flip(store, "log/00000001.partial/1-0", -1)
    found, warnings = spool.read(store, 1)
    assert found.keys() == {(0, 0), (1, 0)}
    assert found[0, 0].answer_tokens[0] == 2
    assert len(warnings) == 1
    assert "log/00000001.partial/1-0" in warnings[0]
    assert "generated again" in warnings[0]


def test_a_number_is_used_once(store: Store) -> None:
    assert spool.next_n(store, 1, attempt=1) == 0
    assert spool.write(store, 1, 1, 0, [trajectory(0, 0)])
    assert not spool.write(store, 1, 1, 0, [trajectory(1, 0)])
    assert spool.next_n(store, 1, attempt=1) == 1
    assert spool.next_n(store, 1, attempt=2) == 0
    assert spool.next_n(store, 2, attempt=1) == 0


def test_clear_takes_one_steps_spool(store: Store) -> None:
    for step in (1, 2):
        spool.write(store, step, 1, 0, [trajectory(0, 0)])
    store.put("log/00000001", b"the record")
    spool.clear(store, 1)
    spool.clear(store, 7)
    assert store.list() == ["log/00000001", "log/00000002.partial/1-0"]
    assert spool.read(store, 1) == ({}, [])
