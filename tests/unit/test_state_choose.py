"""The only recovery rule: on tables of refs, then on real stores with every kind of damage."""

import dataclasses
import re
from pathlib import Path

import pytest
from unit.log_builders import CountingStore, both, flip, hash_at, local_store, make_log, ref, save_state

from linckia.api.config import RunConfig
from linckia_trainer.log import framing
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import newest_valid, refusals
from linckia_trainer.state.tiers import StateRef, Tier, list_states, node_memory, node_memory_folder, verify_state

CASES: list[tuple[str, list[StateRef], int | None, str]] = [
    ("nothing saved", [], None, ""),
    ("the newest", [*both(3), *both(5), *both(4)], 5, ""),
    ("newest incomplete", [*both(3), ref(5, 1, 2)], 3, r"step 5 .*ranks \[0\] of 2 are missing"),
    ("ranks of two attempts make no state", [*both(3), ref(5, 0, 2), ref(5, 1, 2, attempt=2)], 3, "missing"),
    ("ranks of two generations make no state", [*both(3), ref(5, 0, 2), ref(5, 1, 2, generation=2)], 3, "missing"),
    ("ranks of two histories make no state", [*both(3), ref(5, 0, 2), ref(5, 1, 2, log_hash="x")], 3, "missing"),
    ("ranks in two tiers make one", [*both(3), ref(5, 0, 2), ref(5, 1, 2, tier="node_memory")], 5, ""),
    ("beyond the head", [*both(3), *both(8)], 3, "step 8 .*beyond the log's head, 7"),
    ("another history", [*both(3), *both(5, log_hash="x")], 3, "step 5 .*another history: .* x and the log's hash-5"),
    ("the log lost the hash", [*both(3), *both(7, log_hash="y")], 3, "another history"),
    ("another world", [*both(3), ref(5, 0, 1)], 3, "step 5 .*saved by 1 ranks and the group has 2"),
    ("a bigger world", [*both(3), *(ref(5, rank, 4) for rank in range(4))], 3, "saved by 4 ranks"),
    ("damaged", [*both(3), *both(5, invalid="cut off")], 3, "step 5 .*run_directory: cut off"),
    ("one rank damaged", [*both(3), ref(5, 0, 2), ref(5, 1, 2, invalid="cut off")], 3, r"ranks \[1\].*cut off"),
    ("a damaged one, whole in another tier",
     [*both(5, invalid="cut off", tier="node_memory"), *both(5), *both(3)], 5, ""),
    ("state 0", both(0), 0, ""),
    ("nothing valid", [*both(8), ref(2, 0, 2)], None, "beyond"),
]  # fmt: skip


@pytest.mark.parametrize(("refs", "step", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_newest_valid_state_is_chosen_and_the_others_say_why_not(
    refs: list[StateRef], step: int | None, reason: str
) -> None:
    choice = newest_valid(refs, 2, 7, hash_at)
    assert (choice.step if choice else None) == step
    if choice:
        assert [one.rank for one in choice.refs] == [0, 1]
        assert all(one.invalid is None for one in choice.refs)
    reasons = " | ".join(refusals(refs, 2, 7, hash_at))
    assert re.search(reason, reasons) if reason else reasons == ""


def test_a_hash_that_the_log_does_not_hold_refuses() -> None:
    assert newest_valid([ref(12)], 1, 15, hash_at) is None
    assert "does not hold the hash of step 12" in refusals([ref(12)], 1, 15, hash_at)[0]


def test_the_first_tier_is_preferred_for_each_rank() -> None:
    refs = [ref(5, 1, 2, tier="node_memory"), *both(5)]
    choice = newest_valid(refs, 2, 7, hash_at)
    assert choice is not None
    assert [one.tier for one in choice.refs] == ["run_directory", "node_memory"]


def test_of_one_step_the_newest_attempt_is_chosen() -> None:
    refs = [ref(5, attempt=2, generation=1), ref(5, attempt=1, generation=9), ref(5, attempt=2, generation=3)]
    choice = newest_valid(refs, 1, 7, hash_at)
    assert choice is not None
    assert (choice.attempt, choice.generation) == (2, 3)


def test_choosing_again_without_the_one_that_turned_out_damaged() -> None:
    refs = [ref(5, tier="node_memory"), ref(5), ref(3)]
    for expected in ((5, "node_memory"), (5, "run_directory"), (3, "run_directory")):
        choice = newest_valid(refs, 1, 7, hash_at)
        assert choice is not None
        assert (choice.step, choice.refs[0].tier) == expected
        bad = choice.refs[0]
        refs = [dataclasses.replace(one, invalid="changed") if one is bad else one for one in refs]
    assert newest_valid(refs, 1, 7, hash_at) is None


# On real stores


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def test_a_skipped_step_makes_its_trained_state_invalid_and_the_rule_goes_back(store: Store) -> None:
    log = make_log(store, 3)
    for step in (2, 3):
        save_state(store, log, "critic", step)
    log.mark_skip(3, "nan")
    choice = newest_valid(list_states([Tier("run_directory", store)], "critic"), 1, log.head(), log.hash_at)
    assert choice is not None
    assert choice.step == 2


def config_of(tmp_path: Path, directory: str) -> RunConfig:
    sections = {
        "run": {"name": "first", "dir": directory},
        "model": {"path": "/model"},
        "data": {"train": {"file": "/prompts.jsonl"}},
        "reward": {"model": "/reward"},
        "storage": {"node_memory_dir": str(tmp_path / "shm")},
    }
    return RunConfig.model_validate(sections)


def test_runs_of_one_name_in_two_places_have_node_memory_of_their_own(tmp_path: Path) -> None:
    places = ["/home/a/runs/first", "/home/b/runs/first", "s3://bucket/first"]
    folders = [node_memory_folder(config_of(tmp_path, place)) for place in places]
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "shm"}
    assert all(re.fullmatch(r"first-[0-9a-f]{8}", folder.name) for folder in folders)
    for same in ("/home/a/runs/first/", "file:///home/a/runs/first"):
        assert node_memory_folder(config_of(tmp_path, same)) == folders[0]
    assert node_memory(config_of(tmp_path, places[0])).store.uri == str(folders[0])


def test_tiers_are_listed_in_their_order_with_what_is_wrong(store: Store, tmp_path: Path) -> None:
    log = make_log(store, 3)
    memory = node_memory(config_of(tmp_path, str(tmp_path / "run")))
    durable = Tier("run_directory", store)
    save_state(memory.store, log, "policy", 3)
    (cut,) = save_state(store, log, "policy", 1)
    (changed,) = save_state(store, log, "policy", 2)
    save_state(store, log, "policy", 3, run="second")
    save_state(store, log, "critic", 3)
    store.put(cut, store.get(cut)[:-1])
    flip(store, changed, 50)
    store.put("state/policy/notes.txt", b"not ours")

    refs = list_states([memory, durable], "policy", "first")
    assert [(one.tier, one.step) for one in refs] == [
        ("node_memory", 3), ("run_directory", 1), ("run_directory", 2), ("run_directory", 3),
    ]  # fmt: skip
    assert refs[0].invalid is None
    assert "cut off" in str(refs[1].invalid)
    assert "header" in str(refs[2].invalid)
    assert refs[3].invalid == "it is a state of run second"
    assert refs[0].size == memory.store.info(refs[0].key)[0]


def test_a_changed_payload_is_found_by_verify(store: Store) -> None:
    log = make_log(store, 2)
    tiers = [Tier("run_directory", store)]
    (key,) = save_state(store, log, "policy", 2)
    (found,) = list_states(tiers, "policy")
    assert verify_state(tiers, found) is None
    flip(store, key, -600)
    (found,) = list_states(tiers, "policy")
    assert found.invalid is None  # the header does not tell
    assert "payload" in str(verify_state(tiers, found))
    store.delete(key)
    assert verify_state(tiers, found) == "it is gone"


def test_listing_reads_headers_only(store: Store) -> None:
    log = make_log(store, 20)
    for step in range(21):
        save_state(store, log, "policy", step, world=2)
    counting = CountingStore(store.uri)
    assert len(list_states([Tier("run_directory", counting)], "policy")) == 42
    assert counting.calls == {"scan": 1, "read_starts": 1}
    assert counting.bytes_read <= 42 * framing.FIRST_READ_BYTES
