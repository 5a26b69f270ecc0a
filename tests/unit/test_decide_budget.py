"""Restart budgets: fingerprints, limits within a step, waits that double."""

from dataclasses import replace

import pytest

from linckia.api.config import Recovery
from linckia.decide.budget import (
    Failure,
    RecoveryRecord,
    Restart,
    Stop,
    death_fingerprint,
    exception_fingerprint,
    next_restart,
)

POLICY = Recovery(max_restarts_per_step=4, back_off_seconds=5)
KILLED = Failure("policy", 12, death_fingerprint("policy", "update", "SIGKILL"), "death", "rank 1 was killed")
RAISED = Failure(
    "reward", 12, exception_fingerprint("reward", "score", "KeyError", "reward.py:score"), "exception", "KeyError: 'x'"
)


def past(failure: Failure, time: float = 0.0) -> RecoveryRecord:
    return RecoveryRecord(failure.group, failure.step, failure.fingerprint, failure.kind, time)


def test_fingerprints_hold_what_does_not_change() -> None:
    assert KILLED.fingerprint == "policy/update/SIGKILL"
    assert RAISED.fingerprint == "reward/score/KeyError/reward.py:score"


def test_the_first_restart_is_at_once() -> None:
    assert next_restart([], KILLED, 100.0, POLICY) == Restart(0)
    assert next_restart([], RAISED, 100.0, POLICY) == Restart(0)


def test_waits_double_and_are_capped() -> None:
    policy = Recovery(max_restarts_per_step=100, back_off_seconds=5)
    waits = [next_restart([past(KILLED)] * count, KILLED, 0.0, policy) for count in (1, 2, 3, 4, 6, 7, 8, 99)]
    assert waits == [Restart(seconds) for seconds in (5, 10, 20, 40, 160, 300, 300, 300)]


def test_a_wait_counts_from_the_restart_before() -> None:
    earlier = [past(KILLED, 50.0), past(KILLED, 90.0)]
    assert next_restart(earlier, KILLED, 93.0, POLICY) == Restart(7)
    assert next_restart(earlier, KILLED, 500.0, POLICY) == Restart(0)
    assert next_restart(earlier, KILLED, 10.0, POLICY) == Restart(10), "a clock set back makes it no longer"


def test_no_back_off() -> None:
    policy = Recovery(back_off_seconds=0)
    assert next_restart([past(KILLED)] * 3, KILLED, 0.0, policy) == Restart(0)


def test_the_fifth_death_in_a_step_stops() -> None:
    assert isinstance(next_restart([past(KILLED)] * 3, KILLED, 0.0, POLICY), Restart)
    stop = next_restart([past(KILLED)] * 4, KILLED, 0.0, POLICY)
    assert isinstance(stop, Stop)
    assert "policy failed 5 times in step 12" in stop.reason
    assert "max_restarts_per_step = 4" in stop.reason
    assert "5 x policy/update/SIGKILL" in stop.reason
    assert "rank 1 was killed" in stop.reason
    assert "start the run again" in stop.next_step


def test_deaths_of_different_kinds_share_the_budget() -> None:
    hung = replace(KILLED, kind="hang", fingerprint="policy/update/hung")
    stop = next_restart([past(KILLED), past(hung), past(KILLED), past(hung)], KILLED, 0.0, POLICY)
    assert isinstance(stop, Stop)
    assert "3 x policy/update/SIGKILL, 2 x policy/update/hung" in stop.reason


def test_other_steps_and_other_groups_do_not_count() -> None:
    before = [past(replace(KILLED, step=11))] * 9
    elsewhere = [past(replace(KILLED, group="critic"))] * 9
    assert next_restart(before + elsewhere, KILLED, 0.0, POLICY) == Restart(0)


def test_a_lost_node_that_takes_eight_engines_is_no_loop() -> None:
    lost = [replace(KILLED, group=f"rollout-{n}", fingerprint="rollout/generate/NODE_DIED") for n in range(8)]
    done: list[RecoveryRecord] = []
    for failure in lost:
        assert next_restart(done, failure, 0.0, POLICY) == Restart(0)
        done.append(past(failure))


def test_the_same_exception_twice_in_a_step_stops() -> None:
    stop = next_restart([past(RAISED)], RAISED, 0.0, POLICY)
    assert isinstance(stop, Stop)
    assert "reward failed twice in step 12 with the same exception" in stop.reason
    assert "KeyError: 'x'" in stop.reason
    assert "correct the code" in stop.next_step


@pytest.mark.parametrize(
    "other",
    [
        replace(RAISED, step=11),
        replace(RAISED, fingerprint="reward/score/ValueError/reward.py:score"),
        replace(RAISED, kind="death"),
    ],
)
def test_another_step_another_place_or_a_death_is_not_the_same_exception(other: Failure) -> None:
    assert isinstance(next_restart([past(other)], RAISED, 0.0, POLICY), Restart)


def test_exceptions_that_differ_use_up_the_budget_all_the_same() -> None:
    different = [past(replace(RAISED, fingerprint=f"reward/score/E{n}/reward.py:score")) for n in range(4)]
    assert isinstance(next_restart(different, RAISED, 0.0, POLICY), Stop)


def test_no_restarts_allowed() -> None:
    stop = next_restart([], KILLED, 0.0, Recovery(max_restarts_per_step=0))
    assert isinstance(stop, Stop)
    assert "policy failed once in step 12" in stop.reason
