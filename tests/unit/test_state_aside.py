from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec import register_implementation
from unit.log_builders import MemoryPlace, local_store, make_log

from linckia.api.errors import UserError
from linckia_trainer.log.store import Store
from linckia_trainer.state.aside import MARK, refuse_half_moved, set_aside


@pytest.fixture
def bucket() -> Iterator[str]:
    register_implementation("place", MemoryPlace, clobber=True)
    yield "place://bucket/runs"
    MemoryPlace.store.clear()


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def test_a_folder_is_renamed_and_its_name_is_free_again(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    for number in (1, 2):
        make_log(store, number)
        before = contents(store)
        assert set_aside(store, tmp_path / "run") == f"run.old-{number}"
        assert contents(Store(str(tmp_path / f"run.old-{number}"))) == before
        assert not (tmp_path / "run").exists()
    assert set_aside(store, tmp_path / "run") is None


def test_objects_in_a_bucket_and_the_local_folder_go_to_one_number(tmp_path: Path, bucket: str) -> None:
    store, folder = Store(f"{bucket}/first"), tmp_path / "first"
    make_log(store, 3)
    make_log(Store(f"{bucket}/first-and-more"), 1)  # its name begins alike, and it stays
    store.put("attempts/1", b"{}")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "first.old-1").mkdir()
    (tmp_path / "first.old-1" / "metrics.jsonl").write_text("older\n")
    before = contents(store)
    assert set_aside(store, folder) == "first.old-2"
    assert contents(Store(f"{bucket}/first.old-2")) == before
    assert store.list() == []
    assert (tmp_path / "first.old-2" / "metrics.jsonl").read_text() == "{}\n"
    assert not folder.exists()
    assert len(Store(f"{bucket}/first-and-more").list()) == 1


def test_a_move_that_was_killed_is_no_run_and_goes_on(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"{bucket}/first")
    make_log(store, 3)
    before = contents(store)
    move, left = Store.move, 2

    def killed_at_the_third(self: Store, source: str, target: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        move(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "move", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            set_aside(store, tmp_path / "first")
    assert len(store.list()) == 2
    assert store.exists(MARK)
    with pytest.raises(UserError, match="--fresh again"):
        refuse_half_moved(store)
    assert set_aside(store, tmp_path / "first") == "first.old-1"
    assert contents(Store(f"{bucket}/first.old-1")) == before
    assert store.list() == []
    refuse_half_moved(store)


def test_a_run_that_is_a_whole_bucket_is_refused_and_stays(tmp_path: Path, bucket: str) -> None:
    store = Store("place://bucket")
    make_log(store, 1)
    with pytest.raises(UserError, match=r"run\.dir.*whole bucket"):
        set_aside(store, tmp_path / "first")
    assert len(store.list()) == 1
