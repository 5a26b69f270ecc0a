"""The unsteady filesystem of the fault tests: a run that asks again gets through its weather, and the witness says what struck."""

import importlib
import itertools
import json
from pathlib import Path

import pytest
from faults.unsteady import EVERY, UnsteadyFileSystem

from linckia_trainer.log.patience import Patience
from linckia_trainer.log.store import Store, UnreachableError

STEPS = range(1, 20)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A run directory whose waits take no time: a failure is asked again ten times. Every step has left a folder to list."""
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registry._registry, "unsteady", UnsteadyFileSystem)
    seconds = itertools.count()
    patience = Patience(10, now=lambda: float(next(seconds)), sleep=lambda wait: None)
    found = Store(f"unsteady://{tmp_path}/run", {"switch": str(tmp_path / "weather.json")}).patient(patience)
    for step in STEPS:
        found.put(f"log/{step:08d}.partial/1-0", b"")
    return found


def weather(place: Path, fail: str) -> None:
    (place / "weather.json").write_text(json.dumps({"slow": 0, "fail": fail, "below": ["log", "state"]}))


def test_some_writes_fail_after_they_were_done_and_each_object_is_there_once(tmp_path: Path, store: Store) -> None:
    weather(tmp_path, "some")
    assert all(store.put_if_absent(f"log/{step:08d}", str(step).encode()) for step in STEPS)
    struck = (tmp_path / "struck.txt").read_text().splitlines()
    assert len(struck) >= len(STEPS) // EVERY["write"]
    assert all(line.startswith("failed write") for line in struck)
    assert not store.put_if_absent("log/00000001", b"another's")
    assert [store.get(f"log/{step:08d}") for step in STEPS] == [str(step).encode() for step in STEPS]


def test_a_listing_of_many_folders_comes_through_when_it_is_asked_again(tmp_path: Path, store: Store) -> None:
    weather(tmp_path, "some")
    for _ in range(EVERY["list"] // len(STEPS) + 1):
        assert len(store.list("log")) == len(STEPS)
    assert "failed list" in (tmp_path / "struck.txt").read_text()


def test_where_all_fails_nothing_comes_through_and_elsewhere_nothing_fails(tmp_path: Path, store: Store) -> None:
    weather(tmp_path, "all")
    store.put("attempts/1", b"")
    assert store.list("attempts") == ["attempts/1"]
    with pytest.raises(UnreachableError, match="has failed for 10 s"):
        store.list("log")
