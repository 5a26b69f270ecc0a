import json
from pathlib import Path

import pytest
from unit.log_builders import flip, header, local_store, make_log, save_state

from linckia.api.errors import UserError
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.records import Carried
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import newest_valid
from linckia_trainer.state.fork import find_fork_point, fork, read_fork
from linckia_trainer.state.format import read_state
from linckia_trainer.state.tiers import Tier, list_states

GROUPS = {"policy": 2, "critic": 1}
NEW_ORIGIN = "e" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "new"))


@pytest.fixture
def log(store: Store) -> RunLog:
    """States of the policy at 0, 2, 4; of the critic at 0, 2, 5."""
    log = make_log(store, 6)
    for group, steps in (("policy", (0, 2, 4)), ("critic", (0, 2, 5))):
        for step in steps:
            save_state(store, log, group, step, GROUPS[group])
    return log


def test_a_fork_starts_at_the_newest_step_that_all_groups_have(store: Store, target: Store, log: RunLog) -> None:
    before = {key: store.get(key) for key in store.list()}
    point = find_fork_point(store, "first", log, GROUPS)
    assert point.fork.step == 2
    assert point.fork.log_hash == log.log_hash(2)
    made = fork(target, "second", NEW_ORIGIN, point, store)

    assert target.list() == ["fork.json", "state/critic/00000000/0.0/0"] + [
        f"state/policy/00000000/0.0/{rank}" for rank in (0, 1)
    ]
    new_log = RunLog(target, NEW_ORIGIN)
    for group, world in GROUPS.items():
        refs = list_states([Tier("run_directory", target)], group, "second")
        choice = newest_valid(refs, world, new_log.head(), new_log.hash_at)
        assert choice is not None
        for ref in choice.refs:
            new, files = read_state(target, ref.key)
            old, old_files = read_state(store, f"state/{group}/00000002/1.1/{ref.rank}")
            assert (new.run, new.step, new.log_hash, new.attempt, new.generation) == ("second", 0, NEW_ORIGIN, 0, 0)
            assert (old.run, old.step) == ("first", 2)
            assert [(name, bytes(one)) for name, one in files] == [(name, bytes(one)) for name, one in old_files]

    assert made == read_fork(target) == point.fork
    assert made.carried == Carried(8, header(2).kl_coefficient_after, header(2).normalizer_after)
    said = json.loads(target.get("fork.json"))
    assert (said["run"], said["uri"], said["step"], said["log_hash"]) == ("first", store.uri, 2, log.log_hash(2))
    assert {key: store.get(key) for key in store.list()} == before  # the old run is untouched


def test_a_damaged_newest_checkpoint_is_passed_over(store: Store, log: RunLog) -> None:
    flip(store, "state/policy/00000002/1.1/1", -600)
    assert find_fork_point(store, "first", log, GROUPS).fork.step == 0


def test_a_fork_of_a_skipped_step_carries_what_the_skip_left(store: Store) -> None:
    log = make_log(store, 2)
    log.mark_skip(2, "nan")
    save_state(store, log, "policy", 2)
    point = find_fork_point(store, "first", log, {"policy": 1})
    assert point.fork.carried == Carried(8, header(2).kl_coefficient, header(2).normalizer)


def test_a_fork_of_a_fork_that_has_not_trained_carries_on(store: Store, target: Store, log: RunLog) -> None:
    first = fork(target, "second", NEW_ORIGIN, find_fork_point(store, "first", log, GROUPS), store)
    again = find_fork_point(target, "second", RunLog(target, NEW_ORIGIN), GROUPS)
    assert again.fork.step == 0
    assert again.fork.carried == first.carried


def test_a_fork_of_a_run_that_has_not_trained_begins_at_the_beginning(store: Store, target: Store) -> None:
    log = make_log(store, 0)
    save_state(store, log, "policy", 0)
    fork(target, "second", NEW_ORIGIN, find_fork_point(store, "first", log, {"policy": 1}), store)
    found = read_fork(target)
    assert found is not None
    assert found.carried is None


def test_a_fork_that_was_cut_short_is_made_again(store: Store, target: Store, log: RunLog) -> None:
    point = find_fork_point(store, "first", log, GROUPS)
    target.put("state/policy/00000000/0.0/0", b"half of it")
    assert read_fork(target) is None
    fork(target, "second", NEW_ORIGIN, point, store)
    assert all(ref.invalid is None for ref in list_states([Tier("run_directory", target)], "policy", "second"))
    with pytest.raises(UserError, match="is a fork already"):
        fork(target, "second", NEW_ORIGIN, point, store)


def test_without_a_common_checkpoint_the_reasons_are_said(store: Store) -> None:
    log = make_log(store, 2)
    save_state(store, log, "policy", 2, world=2, ranks=[0])
    with pytest.raises(UserError, match=r"no step with a whole checkpoint of policy and critic.*ranks \[1\] of 2"):
        find_fork_point(store, "first", log, GROUPS)
