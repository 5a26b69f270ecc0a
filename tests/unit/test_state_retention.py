from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.log_builders import both, hash_at, ref

from linckia_trainer.state.choose import newest_valid
from linckia_trainer.state.retention import records_to_prune, states_to_delete
from linckia_trainer.state.tiers import StateRef


def delete(refs: list[StateRef], keep: int = 2, head: int = 7) -> set[tuple[int, int, int]]:
    return {(one.step, one.attempt, one.rank) for one in states_to_delete(refs, keep, 2, head, hash_at)}


def test_the_newest_keep_states_stay() -> None:
    refs = [one for step in (1, 5, 3, 4) for one in both(step)]
    assert delete(refs) == {(1, 1, 0), (1, 1, 1), (3, 1, 0), (3, 1, 1)}
    assert delete(refs, keep=4) == set()
    assert delete([]) == set()


def test_incomplete_ones_go_once_a_newer_one_is_complete() -> None:
    assert delete([*both(3), *both(5), ref(4, 0, 2)]) == {(4, 1, 0)}


def test_one_that_is_still_being_written_stays() -> None:
    assert delete([*both(3), *both(5), ref(6, 0, 2)]) == set()
    assert delete([*both(3), *both(5), ref(5, 0, 2, attempt=2)]) == set()


def test_nothing_goes_while_nothing_is_complete() -> None:
    assert delete([ref(1, 0, 2), ref(2, 1, 2), *both(9)]) == set()


@pytest.mark.parametrize(
    "bad",
    [
        both(6, log_hash="another history"),
        both(6, invalid="cut off"),
        [ref(6, rank, 4) for rank in range(4)],
        [ref(6, 1, 2)],
    ],
)
def test_one_that_nobody_could_restore_pushes_no_good_one_out(bad: list[StateRef]) -> None:
    assert delete([*both(3), *both(5), *bad]) == set()
    assert delete([*both(3), *both(5), *bad, *both(7)]) == {(3, 1, 0), (3, 1, 1), *((6, 1, one.rank) for one in bad)}


def test_two_saves_of_one_step_count_once_and_the_older_goes() -> None:
    assert delete([*both(3), *both(5), *both(5, attempt=2)]) == {(5, 1, 0), (5, 1, 1)}


refs_of_a_run = st.lists(
    st.builds(
        ref,
        st.integers(0, 9),
        st.integers(0, 1),
        st.just(2),
        attempt=st.integers(1, 2),
        invalid=st.sampled_from([None, None, None, "cut off"]),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(refs=refs_of_a_run, keep=st.integers(2, 3), head=st.integers(0, 9))
def test_deleting_never_changes_what_a_group_restores(refs: list[StateRef], keep: int, head: int) -> None:
    def restorable(left: list[StateRef]) -> list[int]:
        steps = []
        while choice := newest_valid(left, 2, head, hash_at):
            steps.append(choice.step)
            left = [one for one in left if one.step != choice.step]
        return steps

    gone = states_to_delete(refs, keep, 2, head, hash_at)
    assert restorable([one for one in refs if one not in gone]) == restorable(refs)[:keep]


PRUNE: list[tuple[str, int, dict[str, list[int]], int | None, int]] = [
    ("keep all", 100, {"policy": [80, 90]}, None, 0),
    ("up to the second newest state", 100, {"policy": [70, 80, 90]}, 1, 80),
    ("of the group that is behind", 100, {"policy": [80, 90], "critic": [30, 60]}, 1, 30),
    ("one state is not enough", 100, {"policy": [80, 90], "critic": [60]}, 1, 0),
    ("no state is not enough", 100, {"policy": [80, 90], "critic": []}, 1, 0),
    ("one state twice is not enough", 100, {"policy": [90, 90]}, 1, 0),
    ("log_keep asks for more", 100, {"policy": [80, 90]}, 50, 50),
    ("log_keep asks for all", 100, {"policy": [80, 90]}, 100, 0),
    ("never the head", 90, {"policy": [90, 90, 89]}, 1, 89),
    ("no stateful group", 100, {}, 1, 0),
    ("nothing yet", 0, {"policy": [0]}, 1, 0),
]


@pytest.mark.parametrize(("head", "durable", "keep", "last"), [one[1:] for one in PRUNE], ids=[one[0] for one in PRUNE])
def test_records_go_only_when_nobody_can_need_them(head: int, durable: Any, keep: int | None, last: int) -> None:
    assert records_to_prune(head, durable, keep) == range(1, last + 1)


def test_the_head_stays_whatever_the_states_say() -> None:
    assert 7 not in records_to_prune(7, {"policy": [7, 8, 9]}, 1)
