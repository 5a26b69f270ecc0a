"""What follows the end of a controller: started again, or the supervisor's own exit code."""

from dataclasses import replace

import pytest

from linckia.api.config import Recovery
from linckia.decide.supervise import Exit, Life, Start, next_start

POLICY = Recovery(max_restarts_per_step=4, back_off_seconds=5)
KILLED = Life(attempt=1, exit_code=-9, head=3, ended=100.0)
RAISED = Life(
    2, 1, 3, 100.0, cause="KeyError: 'x'", fingerprint="KeyError:reward.py:score", kind="exception"
)  # fmt: skip
RAY_BROKE = Life(2, 1, 3, 100.0, cause="RpcError: gone", fingerprint="RpcError:worker.py:get", kind="death")


def follows(*lives: Life, now: float = 100.0, stopping: bool = False) -> Start | Exit:
    return next_start(lives, now, POLICY, stopping)


@pytest.mark.parametrize("life", [KILLED, RAISED, RAY_BROKE, replace(KILLED, attempt=0, head=0, exit_code=1)])
def test_a_first_failure_is_answered_at_once(life: Life) -> None:
    found = follows(life)
    assert isinstance(found, Start)
    assert found.after_seconds == 0


def test_the_words_say_who_ended_how_and_where() -> None:
    assert follows(KILLED).words == "attempt 1 was killed by SIGKILL; it is started again now (1 at step 3)"
    assert "attempt 2 failed: KeyError: 'x'; it" in follows(RAISED).words
    assert "the controller ended with exit code 1; it" in follows(Life(0, 1, 0, 100.0)).words
    assert "killed by signal 99" in follows(replace(KILLED, exit_code=-99)).words


@pytest.mark.parametrize(
    ("life", "code"),
    [
        (Life(1, 0, 9, 100.0), 0),  # finished, or stopped by a person
        (Life(1, 2, 3, 100.0, "reward: raised", "reward/score", "exception"), 2),
        (Life(1, 3, 3, 100.0, "policy: failed 5 times", "policy/update/SIGKILL", "exception"), 3),
        (Life(1, 4, 3, 100.0), 4),
        (Life(1, 130, 3, 100.0, "KeyboardInterrupt", "KeyboardInterrupt:run.py:x", "death"), 130),
        (Life(1, -2, 3, 100.0), 130),
    ],
)
def test_what_only_a_person_can_go_on_with_is_never_started_again(life: Life, code: int) -> None:
    found = follows(life)
    assert isinstance(found, Exit)
    assert found.code == code


@pytest.mark.parametrize("life", [KILLED, RAISED, replace(KILLED, attempt=0)])
def test_who_was_replaced_does_not_come_back(life: Life) -> None:
    found = follows(replace(life, replaced=True))
    assert isinstance(found, Exit)
    assert found.code == 4
    assert "newer attempt" in found.words


def test_told_to_stop_it_ends_as_its_controller_did() -> None:
    assert follows(replace(KILLED, exit_code=-15), stopping=True) == Exit(143, "")
    assert follows(replace(KILLED, exit_code=0), stopping=True) == Exit(0, "")
    assert follows(RAISED, stopping=True) == Exit(1, "")


def test_the_same_exception_twice_in_a_row_is_a_crash_loop() -> None:
    found = follows(RAISED, replace(RAISED, attempt=3))
    assert isinstance(found, Exit)
    assert found.code == 3
    assert "KeyError:reward.py:score" in found.words
    assert "correct the code" in found.words
    assert "after" not in found.words


def test_a_step_that_is_recorded_each_time_hides_no_crash_loop() -> None:
    assert isinstance(follows(RAISED, replace(RAISED, head=4)), Exit)
    assert isinstance(follows(RAISED, replace(RAISED, head=5)), Start)  # it came further than the next step


@pytest.mark.parametrize(
    "lives",
    [
        [RAISED, KILLED, RAISED],
        [RAISED, replace(RAISED, fingerprint="ValueError:reward.py:score")],
        [RAY_BROKE, RAY_BROKE],
    ],
)
def test_other_failures_in_a_row_are_no_such_loop(lives: list[Life]) -> None:
    assert isinstance(follows(*lives), Start)


def test_the_fifth_failure_at_one_head_is_a_crash_loop() -> None:
    assert isinstance(follows(*[KILLED] * 4), Start)
    found = follows(*[KILLED] * 3, RAY_BROKE, KILLED)
    assert isinstance(found, Exit)
    assert found.code == 3
    for words in ("5 times at step 3", "max_restarts_per_step = 4", "was killed by SIGKILL", "Next: ", "from step 3"):
        assert words in found.words


def test_a_log_that_grows_is_no_loop() -> None:
    lives = [replace(KILLED, head=head) for head in range(50)]
    assert follows(*lives) == replace(follows(*lives), after_seconds=0)
    assert isinstance(follows(*[KILLED] * 4, replace(KILLED, head=4)), Start)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 0), (2, 5), (3, 10), (4, 20)])
def test_waits_double(failures: int, seconds: float) -> None:
    found = follows(*[KILLED] * failures)
    assert isinstance(found, Start)
    assert found.after_seconds == seconds
    assert ("in 10 s" in found.words) == (seconds == 10)


def test_waits_are_capped_and_time_that_passed_counts() -> None:
    policy = Recovery(max_restarts_per_step=100, back_off_seconds=5)
    capped = next_start([KILLED] * 60, 100.0, policy)
    assert isinstance(capped, Start)
    assert capped.after_seconds == 300
    later = next_start([KILLED] * 3, 104.0, policy)
    assert isinstance(later, Start)
    assert later.after_seconds == 6
