import json
from pathlib import Path

import pytest
from unit.log_builders import ORIGIN, flip, local_store, make_log, payload, save_state

from linckia.api.errors import LiveRunError, UserError
from linckia_trainer.log.chain import RunLog, record_key, skip_key
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import newest_valid
from linckia_trainer.state.rewind import rewind
from linckia_trainer.state.tiers import Tier, list_states

GROUPS = {"policy": 2, "critic": 1}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "shm" / "first"))


def save_all(store: Store, log: RunLog, step: int) -> None:
    for group, world in GROUPS.items():
        save_state(store, log, group, step, world)


@pytest.fixture
def log(store: Store, memory: Store) -> RunLog:
    """Six records, the fourth skipped, a spool; states 0, 3 and 6 in the run directory, 5 and 6 in node memory."""
    log = make_log(store, 4)
    log.mark_skip(4, "nan")
    for step in (5, 6):
        log.commit(step, payload(step), attempt=1)
    store.put("log/00000007.partial/1-0", b"spooled")
    store.put("attempts/1", b"{}")
    for step in (0, 3, 6):
        save_all(store, log, step)
    for step in (5, 6):
        save_all(memory, log, step)
    return log


def contents(*stores: Store) -> dict[str, bytes]:
    """What is stored, wherever it is, but for rewind's own notes."""
    return {
        f"{store.uri}:{key.split('/', 2)[2] if key.startswith('rewound') else key}": store.get(key)
        for store in stores
        for key in store.list()
        if not key.endswith("rewind.json")
    }


def test_what_came_later_is_moved_aside_and_nothing_is_lost(store: Store, memory: Store, log: RunLog) -> None:
    before = contents(store, memory)
    moved = rewind(store, memory, 3, GROUPS, log=log, live=False)
    assert contents(store, memory) == before
    assert store.list("log") == [record_key(step) for step in (1, 2, 3)]
    assert [key for key in memory.list() if not key.startswith("rewound/1/state/")] == []
    assert {key for key in store.list("state") if "00000006" in key} == set()
    assert store.list("attempts") == ["attempts/1"]
    assert set(moved) >= {skip_key(4), record_key(6), "log/00000007.partial/1-0", "state/critic/00000005/1.1/0"}
    assert json.loads(store.get("rewound/1/rewind.json")).keys() == {"to_step", "head", "time"}
    assert log.head() == 3
    assert RunLog(store, ORIGIN).verify(0, deep=True) == []


def test_the_run_goes_on_from_there_and_can_be_rewound_again(store: Store, memory: Store, log: RunLog) -> None:
    rewind(store, memory, 3, GROUPS, log=log, live=False)
    log.commit(4, payload(4, variant=1), attempt=2)
    assert not log.skipped(4)
    save_all(store, log, 4)
    rewind(store, memory, 0, GROUPS, log=log, live=False)
    assert "rewound/2/log/00000004" in store.list("rewound/2")
    assert log.head() == 0
    for group, world in GROUPS.items():
        choice = newest_valid(list_states([Tier("run_directory", store)], group), world, 0, log.hash_at)
        assert choice is not None
        assert choice.step == 0


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_damaged_record_is_passed_by_the_rewind_its_error_names(
    store: Store, memory: Store, log: RunLog, step: int
) -> None:
    flip(store, record_key(step), 50)
    rewind(store, memory, step - 1, GROUPS, log=RunLog(store, ORIGIN), live=False)
    assert RunLog(store, ORIGIN).verify(0) == []
    assert RunLog(store, ORIGIN).head() == step - 1


def test_a_skip_that_counts_stays(store: Store, memory: Store, log: RunLog) -> None:
    expected = log.log_hash(4)
    rewind(store, memory, 4, GROUPS, log=log, live=False)
    assert store.exists(skip_key(4))
    assert log.log_hash(4) == expected
    assert log.skipped(4)


def test_a_mark_that_counted_for_nothing_does_not_come_to_life(store: Store, memory: Store, log: RunLog) -> None:
    store.put(skip_key(3), b"{}")
    log.refresh()
    expected = log.log_hash(3)
    rewind(store, memory, 3, GROUPS, log=log, live=False)
    assert not store.exists(skip_key(3))
    assert store.exists(f"rewound/1/{skip_key(3)}")
    assert log.log_hash(3) == expected


def test_a_live_run_is_refused(store: Store, memory: Store, log: RunLog) -> None:
    before = store.list()
    with pytest.raises(LiveRunError, match="linckia stop"):
        rewind(store, memory, 3, GROUPS, log=log, live=True)
    assert store.list() == before


@pytest.mark.parametrize("step", [-1, 7])
def test_a_step_that_is_not_there_is_refused(store: Store, memory: Store, log: RunLog, step: int) -> None:
    with pytest.raises(UserError, match="the log has steps 0 to 6"):
        rewind(store, memory, step, GROUPS, log=log, live=False)


def test_without_a_state_to_restore_it_is_refused_with_the_reasons(store: Store, memory: Store, log: RunLog) -> None:
    for step in (0, 3):
        store.delete(f"state/critic/{step:08d}")
    before = store.list()
    with pytest.raises(UserError, match=r"no state of group critic at or before it.*step 6.*beyond"):
        rewind(store, memory, 4, GROUPS, log=log, live=False)
    assert store.list() == before
    rewind(store, memory, 5, GROUPS, log=log, live=False)  # node memory holds one of step 5


def test_damage_between_the_state_and_the_step_is_refused(store: Store, memory: Store, log: RunLog) -> None:
    flip(store, record_key(2), -1)
    log = RunLog(store, ORIGIN)
    with pytest.raises(UserError, match=r"the record of step 2 is damaged too.*rewind to step 1"):
        rewind(store, memory, 2, GROUPS, log=log, live=False)
    rewind(store, memory, 1, GROUPS, log=log, live=False)
    assert log.head() == 1


def test_cut_short_at_any_move_it_leaves_a_log_without_gaps_and_can_be_finished(
    store: Store, memory: Store, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store, memory)
    move = Store.move
    moves_left = 0

    def move_until_killed(self: Store, source: str, target: str) -> None:
        nonlocal moves_left
        if not moves_left:
            raise KeyboardInterrupt
        moves_left -= 1
        move(self, source, target)

    monkeypatch.setattr(Store, "move", move_until_killed)
    for _ in range(30):
        moves_left = 1
        try:
            rewind(store, memory, 3, GROUPS, log=RunLog(store, ORIGIN), live=False)
        except KeyboardInterrupt:
            assert RunLog(store, ORIGIN).verify(0) == []
            assert contents(store, memory) == before
        else:
            break
    assert store.list("log") == [record_key(step) for step in (1, 2, 3)]
    assert contents(store, memory) == before
