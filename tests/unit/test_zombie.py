"""A controller that was stopped and replaced goes on where it stood: what of it can still land, and what it may not do."""

import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from unit.log_builders import ORIGIN, local_store, make_log, payload

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError
from linckia.api.plan import Plan
from linckia_trainer.attempt import describe_failure, watching_for_newer
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.placement import Placed
from linckia_trainer.groups.replace import Parts, Site, replace
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog, record_key
from linckia_trainer.log.store import Store
from linckia_trainer.start import Standing, start_groups


class StoppedStore(Store):
    """A store whose next put-if-absent is held, while ``meanwhile`` happens, between its caller and the storage."""

    meanwhile: Callable[[], Any] | None = None

    def put_if_absent(self, key: str, data: Any) -> bool:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        return super().put_if_absent(key, data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def stopped_in_commit(store: Store, step: int, meanwhile: Callable[[], Any]) -> Any:
    """Attempt 1 comes to its put of ``step``'s record, is stopped there, and is continued after ``meanwhile``."""
    held = StoppedStore(store.uri)
    log = RunLog(held, ORIGIN)
    held.meanwhile = meanwhile
    return log.commit(step, payload(step, variant=7), attempt=1)


def test_a_record_put_where_one_was_pruned_meanwhile_is_no_part_of_the_run(store: Store) -> None:
    make_log(store, 2)
    newer = RunLog(store, ORIGIN)

    def go_on() -> None:
        for step in range(3, 9):
            newer.commit(step, payload(step), attempt=2)
        newer.prune([1, 2, 3, 4, 5])

    stopped_in_commit(store, 3, go_on)
    assert store.exists(record_key(3))  # the witness that it landed
    reopened = RunLog(store, ORIGIN)
    assert reopened.head() == 8
    warnings = reopened.verify(needed_after=5, deep=True)
    assert [one.partition(":")[0] for one in warnings] == [record_key(4), record_key(5)]
    assert all("no group needs it" in one for one in warnings)
    assert [reopened.log_hash(step) for step in (5, 6, 7, 8)] == [newer.log_hash(step) for step in (5, 6, 7, 8)]
    assert reopened.commit(9, payload(9), attempt=2).previous == newer.log_hash(8)


# ---- what it may not do ------------------------------------------------------------------------------------------


class Untouchable:
    """A group, or a placement, that the newer attempt may have adopted."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"a replaced attempt reaches for {name}")


def replaced_site(store: Store) -> Site:
    attempts.claim(store, {})
    attempts.claim(store, {}, takeover=True)
    placed = cast(Placed, Untouchable())
    return Site(cast(RunConfig, Untouchable()), store, 1, ORIGIN, "cpu", {}, placed)


def test_it_replaces_no_group(store: Store) -> None:
    with pytest.raises(FencedError, match="attempt 1 was replaced"):
        replace(replaced_site(store), cast(ActorGroup, Untouchable()), Parts(), lambda group: None)


def test_it_clears_nothing_away_for_a_start_of_its_own(store: Store) -> None:
    site = replaced_site(store)
    with pytest.raises(FencedError, match="attempt 1 was replaced"):
        start_groups(site.config, cast(Plan, Untouchable()), store, 1, ORIGIN, lambda text: None)


class ClosedOutput:
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")

    def flush(self) -> None:
        raise BrokenPipeError("nobody reads")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Waits for the exit of this process, which is none here, and says its code. Nobody comes back from it."""
    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()
        threading.Event().wait()

    def first_code() -> int:
        assert left.wait(10)
        return codes[0]

    monkeypatch.setattr(os, "_exit", leave)
    return first_code


@pytest.mark.parametrize("output", [io.StringIO(), ClosedOutput()])
def test_it_exits_as_replaced_even_if_nobody_can_be_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, exits: Callable[[], int], output: Any
) -> None:
    replaced_site(store)
    monkeypatch.setattr(sys, "stdout", output)
    with watching_for_newer(store, 1):
        assert exits() == 4


def test_a_storage_that_fails_oddly_does_not_end_the_watch(
    store: Store, monkeypatch: pytest.MonkeyPatch, exits: Callable[[], int]
) -> None:
    asked: list[int] = []

    def superseded(store: Store, attempt: int) -> bool:
        asked.append(attempt)
        if len(asked) == 1:
            raise RuntimeError("a client's own error")
        return True

    monkeypatch.setattr(attempts, "superseded", superseded)
    monkeypatch.setattr(attempts, "SIGN_SECONDS", 0.0)
    with watching_for_newer(store, 1):
        assert exits() == 4


def test_it_removes_nothing_at_its_end(store: Store) -> None:
    groups = {"policy": cast(ActorGroup, Untouchable())}
    Standing(groups, replaced_site(store), False).remove()
    with pytest.raises(pytest.fail.Exception):  # the witness that it would have reached for them
        Standing(groups, Site(cast(RunConfig, None), store, 2, ORIGIN, "cpu", {}, cast(Placed, None)), False).remove()


# ---- how an attempt's end is written down ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), "exception"),
        (ConnectionResetError("peer"), "death"),
        (MemoryError(), "death"),
        (GroupLostError("policy", 1, "death", "ActorDiedError", "it died"), "death"),
    ],
)
def test_a_failure_from_outside_is_told_from_one_that_would_be_raised_again(error: Exception, kind: str) -> None:
    assert describe_failure(error)[2] == kind


def test_what_ray_wraps_is_judged_by_its_cause() -> None:
    from ray import exceptions

    raised = exceptions.RayTaskError("f", "Traceback", KeyError("x"))
    assert describe_failure(raised)[2] == "exception"
    assert describe_failure(raised.as_instanceof_cause())[0] == "KeyError: 'x'"
    assert describe_failure(exceptions.RpcError("unavailable"))[2] == "death"
    assert describe_failure(exceptions.LocalRayletDiedError("raylet"))[2] == "death"
