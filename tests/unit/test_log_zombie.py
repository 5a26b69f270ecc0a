"""A controller that is stopped with a put in flight, replaced, and continued: the log stays one valid chain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.log_builders import ORIGIN, payload

from linckia_trainer.log import attempts, framing
from linckia_trainer.log.chain import RunLog, record_key
from linckia_trainer.log.store import Store


class StoppedInPut(Store):
    """The process is stopped once, just before or just after the store takes its object; ``meanwhile`` happens then."""

    stop_before: Callable[[], None] | None = None
    stop_after: Callable[[], None] | None = None

    def put_if_absent(self, key: str, data: Any) -> bool:
        before, self.stop_before = self.stop_before, None
        if before is not None:
            before()
        made = super().put_if_absent(key, data)
        after, self.stop_after = self.stop_after, None
        if after is not None:
            after()
        return made


@pytest.fixture
def zombie(tmp_path: Path) -> RunLog:
    """The log of attempt 1, two steps long."""
    store = StoppedInPut(str(tmp_path))
    attempts.claim(store, {"host": "a"})
    log = RunLog(store, ORIGIN)
    for step in (1, 2):
        log.commit(step, payload(step), attempt=1)
    return log


def go_on(folder: str, steps: int) -> None:
    """Attempt 2 takes over and does ``steps`` steps."""
    store = Store(folder)
    assert attempts.claim(store, {"host": "b"}, takeover=True) == 2
    log = RunLog(store, ORIGIN)
    for step in range(log.head() + 1, log.head() + steps + 1):
        log.commit(step, payload(step, variant=2), attempt=2)


def writers(folder: str) -> list[int]:
    """Which attempt wrote each step's record, once every byte of the chain is checked."""
    store = Store(folder)
    log = RunLog(store, ORIGIN)
    assert log.verify(needed_after=0, deep=True) == []
    return [framing.unpack(store.get(record_key(step)))[0]["attempt"] for step in log.steps()]


def test_a_put_in_flight_that_lands_first_is_the_steps_record_for_all(zombie: RunLog) -> None:
    folder = zombie.store.uri
    zombie.store.stop_after = lambda: go_on(folder, 2)  # type: ignore[attr-defined]
    record = zombie.commit(3, payload(3), attempt=1)
    assert writers(folder) == [1, 1, 1, 2, 2]
    assert RunLog(Store(folder), ORIGIN).log_hash(3) == record.log_hash
    assert attempts.superseded(zombie.store, 1)


def test_a_put_in_flight_that_comes_late_leaves_nothing(zombie: RunLog) -> None:
    folder = zombie.store.uri
    zombie.store.stop_before = lambda: go_on(folder, 3)  # type: ignore[attr-defined]
    record = zombie.commit(3, payload(3), attempt=1)
    assert writers(folder) == [1, 1, 2, 2, 2]
    assert (record.arrays["tokens"] == RunLog(Store(folder), ORIGIN).read(3).arrays["tokens"]).all()
    assert zombie.head() == 5  # it has seen how far the log went on: even unwatched it could only follow
    assert attempts.superseded(zombie.store, 1)
