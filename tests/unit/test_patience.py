"""A storage that fails for a while: how long it is waited for, which errors are, and that no answer counts twice."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linckia.api.errors import UserError
from linckia_trainer.log.patience import LONGEST_WAIT, Patience
from linckia_trainer.log.store import DiskFullError, Store, UnreachableError


class Weather:
    """Seconds that pass only where somebody waits; ``fails`` until then, by the number of the error."""

    def __init__(self, until: float, number: int = errno.EIO) -> None:
        self.until = until
        self.number = number
        self.seconds = 0.0
        self.waits: list[float] = []
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.seconds += seconds

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, self.said.append, lambda: self.seconds, self.sleep)

    def over(self, call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        """``call`` that fails in bad weather: before anything is done, or ``after`` all was."""

        def called(*arguments: Any) -> Any:
            bad = self.seconds < self.until
            result = call(*arguments) if after or not bad else None
            if bad:
                raise OSError(self.number, "the storage fails")
            return result

        return called


def store_in(tmp_path: Path, weather: Weather, patience: float, method: str, after: bool = False) -> Store:
    store = Store(str(tmp_path)).patient(weather.patience(patience))
    monkey: Any = store._backend
    setattr(monkey, method, weather.over(getattr(monkey, method), after))
    return store


@pytest.mark.parametrize(
    ("method", "call", "wanted"),
    [
        ("create", lambda store: store.put_if_absent("log/1", b"x"), True),
        ("replace", lambda store: store.put("log/1", b"x"), None),
        ("read", lambda store: store.get("log/0"), b"there"),
        ("read_starts", lambda store: store.read_start("log/0", 2), b"th"),
        ("scan", lambda store: store.list("log"), ["log/0"]),
        ("info", lambda store: store.exists("log/0"), True),
        ("delete", lambda store: store.delete("log/0"), None),
    ],
)
def test_a_failure_of_some_seconds_is_waited_out_and_said_once(
    tmp_path: Path, method: str, call: Callable[[Store], Any], wanted: Any
) -> None:
    Store(str(tmp_path)).put("log/0", b"there")
    weather = Weather(until=10)
    store = store_in(tmp_path, weather, 60, method)
    assert call(store) == wanted
    assert 10 <= weather.seconds < 30
    [said] = weather.said
    assert str(tmp_path) in said
    assert "the storage fails" in said
    assert "60 s" in said


def test_waits_grow_and_are_bounded(tmp_path: Path) -> None:
    weather = Weather(until=200)
    store_in(tmp_path, weather, 300, "create").put_if_absent("log/1", b"x")
    assert weather.waits == sorted(weather.waits)
    assert weather.waits[1] == 2 * weather.waits[0]
    assert max(weather.waits) == LONGEST_WAIT


def test_patience_ends_with_words_that_say_what_to_do(tmp_path: Path) -> None:
    weather = Weather(until=1e9)
    with pytest.raises(UnreachableError, match=r"run\.dir.*failed for 60 s.*the same command goes on"):
        store_in(tmp_path, weather, 60, "read").get("log/1")
    assert weather.seconds == 60


def test_without_patience_the_first_failure_is_raised_as_it_is(tmp_path: Path) -> None:
    weather = Weather(until=10)
    with pytest.raises(OSError, match="the storage fails"):
        store_in(tmp_path, weather, 0, "read").get("log/1")
    assert (weather.seconds, weather.said) == (0, [])


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(errno.ENOSPC, DiskFullError), (errno.EACCES, UserError), (errno.EROFS, UserError), (errno.ENOENT, OSError)],
)
def test_what_a_person_has_to_put_right_and_what_is_an_answer_is_not_waited_for(
    tmp_path: Path, number: int, wanted: type[Exception]
) -> None:
    weather = Weather(until=10, number=number)
    with pytest.raises(wanted):
        store_in(tmp_path, weather, 60, "replace").put("log/1", b"x")
    assert (weather.seconds, weather.said) == (0, [])


def test_a_create_whose_answer_was_lost_is_ours(tmp_path: Path) -> None:
    weather = Weather(until=1)
    assert store_in(tmp_path, weather, 60, "create", after=True).put_if_absent("log/1", [b"mi", b"ne"])
    assert Store(str(tmp_path)).get("log/1") == b"mine"


def test_a_create_that_failed_while_another_made_it_is_not_ours(tmp_path: Path) -> None:
    Store(str(tmp_path)).put("log/1", b"theirs")
    weather = Weather(until=1)
    assert not store_in(tmp_path, weather, 60, "create").put_if_absent("log/1", b"mine")


def test_a_create_that_finds_the_same_bytes_at_once_is_not_ours(tmp_path: Path) -> None:
    Store(str(tmp_path)).put("log/1", b"mine")
    assert not store_in(tmp_path, Weather(until=0), 60, "create").put_if_absent("log/1", b"mine")
