import signal
from dataclasses import replace

import pytest

from linckia.api.errors import UserError
from linckia.faults import aim, inject, trial
from linckia.faults.inject import FAULTS, Aim

HASHES = {4: "h4", 5: "h5"}


def member(rank=0, generation=1, pid=100, step=4, **more):
    stateful = {"applied_step": step, "log_hash": HASHES.get(step, "?")} if step is not None else {}
    processes = [{"pid": pid, "start_time": 7}]
    return {"rank": rank, "generation": generation, "pid": pid, "processes": processes, **stateful, **more}


def view(step=5, stage="update", attempt=1, **groups):
    shown = {
        "policy": {"generation": 1, "returning": False, "members": [member(0), member(1, pid=101)]},
        "rollout-0": {"generation": 2, "returning": False, "members": [member(0, 2, 102, step=None)]},
    }
    return {"run": "sort", "step": step, "stage": stage, "attempt": attempt, "groups": {**shown, **groups}}


class Time:
    """Seconds pass only where somebody waits for them."""

    def __init__(self):
        self.seconds = 1000.0
        self.clock = trial.Clock(lambda: self.seconds, self.wait)

    def wait(self, seconds):
        self.seconds += seconds


def looks(*views):
    """One after the other; the last for ever."""
    left = list(views)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


WITNESS = trial.Witness("policy/1", 101, 7, 1, 1, 1000.0, 5, "update", 5, "update")


# ---- aim ---------------------------------------------------------------------------------------------------------


def test_targets_are_what_the_fault_takes():
    assert aim.targets(view(), FAULTS["kill"]) == ["policy/0", "policy/1", "rollout-0/0"]
    assert aim.targets(view(), FAULTS["corrupt-state"]) == ["policy/0", "policy/1"]
    assert aim.targets(view(), FAULTS["controller-kill"]) == ["controller"]


def test_a_group_that_was_not_heard_of_yet_is_waited_for():
    starting = view(policy={"generation": 1, "members": []})
    assert aim.targets(starting, FAULTS["kill"]) == ["policy", "rollout-0/0"]
    aim.check_target(starting, "policy/1", FAULTS["kill"])
    assert aim.aim_at(starting, "policy/1") is None
    with pytest.raises(UserError, match="this fault takes policy, rollout-0/0"):
        aim.check_target(starting, "rollout-0/1", FAULTS["kill"])


@pytest.mark.parametrize("target", ["policy", "policy/1", "rollout-0"])
def test_a_target_that_is_there(target):
    aim.check_target(view(), target, FAULTS["kill"])


@pytest.mark.parametrize(
    ("target", "fault"), [("policy/2", "kill"), ("critic", "kill"), ("rollout-0", "truncate-state"), ("policy", "controller-hang")]
)  # fmt: skip
def test_a_target_that_is_not_there_is_refused_with_those_that_are(target, fault):
    with pytest.raises(UserError) as caught:
        aim.check_target(view(), target, FAULTS[fault])
    for there in aim.targets(view(), FAULTS[fault]):
        assert there in str(caught.value)


def test_a_rank_that_is_no_number_and_a_fault_that_does_not_exist():
    with pytest.raises(UserError, match="policy/1"):
        aim.split_target("policy/one")
    with pytest.raises(UserError, match="kill, exit, hang"):
        aim.choose_fault(FAULTS, "kil")


def test_the_process_is_named_by_pid_and_start_time():
    assert aim.aim_at(view(), "policy/1") == Aim("policy", 1, 101, 7, 1)
    coming_up = {"generation": 2, "members": [member(generation=1)]}
    assert aim.aim_at(view(policy=coming_up), "policy") is None


def test_a_group_stands_when_its_new_generation_is_heard_of_and_at_work():
    def shown(**changes):
        return view(policy={"generation": 2, "returning": False, "members": [member(generation=2)], **changes})

    assert aim.stands(shown(), "policy", 1)
    assert not aim.stands(shown(), "policy", 2)
    assert not aim.stands(shown(returning=True), "policy", 1)
    assert not aim.stands(shown(members=[]), "policy", 1)
    assert not aim.stands(shown(members=[member(generation=1)]), "policy", 1)
    assert not aim.stands(shown(), "critic", 0)


# ---- the faults themselves ---------------------------------------------------------------------------------------


@pytest.fixture
def signals(monkeypatch):
    sent = []
    monkeypatch.setattr(inject, "start_time", lambda pid: 7)
    monkeypatch.setattr(inject.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


@pytest.mark.parametrize(
    ("fault", "number"),
    [("kill", signal.SIGKILL), ("exit", signal.SIGTERM), ("hang", signal.SIGSTOP), ("controller-hang", signal.SIGSTOP)],
)
def test_signals(signals, fault, number):
    FAULTS[fault].strike(Aim("policy", 0, 100, 7))
    assert signals == [(100, number)]


def test_another_process_with_the_pid_is_not_hit(signals):
    with pytest.raises(UserError, match="gone already"):
        inject.kill(Aim("policy", 0, 100, 6))
    with pytest.raises(UserError, match="gone already"):
        inject.kill(Aim("policy", 0, 100, None))
    assert signals == []


def test_a_straggler_runs_a_tenth_of_the_time_and_freely_at_the_end(signals, monkeypatch):
    time = Time()
    monkeypatch.setattr(inject.time, "monotonic", lambda: time.seconds)
    monkeypatch.setattr(inject.time, "sleep", time.wait)
    inject.slow(Aim("policy", 0, 100, 7, seconds=0.95))
    stops = [number for _, number in signals]
    assert stops.count(signal.SIGSTOP) == 10
    assert stops[:2] == [signal.SIGSTOP, signal.SIGCONT]
    assert stops[-1] == signal.SIGCONT
    assert time.seconds == pytest.approx(1001.0)


@pytest.fixture
def states(tmp_path):
    """Two tiers with states of step 2 and 4; the newest only in the first."""
    for tier, steps in (("memory", (2, 4)), ("disk", (2,))):
        for step in steps:
            for rank in (0, 1):
                path = tmp_path / tier / f"state/policy/{step:08d}/1.1/{rank}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(range(10)))
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "content"),
    [("corrupt-state", bytes([0, 1, 2, 3, 4, 250, 6, 7, 8, 9])), ("truncate-state", bytes(range(5)))],
)
def test_the_newest_state_of_the_rank_alone_is_damaged_before_the_kill(signals, states, fault, content):
    whole = bytes(range(10))
    hit = states / "memory/state/policy/00000004/1.1/1"
    FAULTS[fault].strike(Aim("policy", 1, 100, 7, states=(states / "memory", states / "disk")))
    assert hit.read_bytes() == content
    assert [path.read_bytes() for path in states.rglob("*") if path.is_file() and path != hit] == [whole] * 5
    assert signals == [(100, signal.SIGKILL)]


def test_no_state_to_damage(signals, states):
    with pytest.raises(UserError, match="no state of it is saved"):
        inject.corrupt_state(Aim("critic", 0, 100, 7, states=(states / "memory",)))
    assert signals == []


# ---- the moment, the strike, the healing -------------------------------------------------------------------------


def find(shown):
    return aim.aim_at(shown, "policy/1")


def test_it_waits_for_stage_and_step():
    time = Time()
    seen = looks(view(4, "update"), view(5, "score"), None, view(5, "update"))
    found, hit = trial.await_moment(seen, find, "policy/1", trial.Moment("update", 5), 60, time.clock)
    assert (found["step"], found["stage"], hit.pid) == (5, "update", 101)


def test_a_run_that_ends_first_or_a_moment_that_never_comes():
    time = Time()
    with pytest.raises(UserError, match="ended before"):
        trial.await_moment(looks(view(4), None), find, "policy/1", trial.Moment(None, 9), 600, time.clock)
    assert time.seconds == pytest.approx(1000 + trial.SILENT_SECONDS, abs=0.1)
    with pytest.raises(UserError, match="not seen at step 9"):
        trial.await_moment(looks(view(4)), find, "policy/1", trial.Moment(None, 9), 5, time.clock)


def test_the_witness_says_where_the_run_stood_before_and_after():
    struck = []
    fault = replace(FAULTS["kill"], strike=struck.append)
    hit = Aim("policy", 1, 101, 7, 1)
    witness = trial.strike(looks(view(5, "sync")), fault, view(5, "update"), hit, Time().clock)
    assert witness == replace(WITNESS, stage_after="sync")
    assert struck == [hit]


def test_healed_is_a_newer_generation_at_work():
    time = Time()
    back = view(policy={"generation": 2, "returning": False, "members": [member(0, 2), member(1, 2)]})
    coming = view(policy={"generation": 2, "returning": True, "members": [member(0, 2), member(1, 2)]})
    seen = looks(view(), None, coming, back)
    assert trial.await_healed(seen, FAULTS["kill"], WITNESS, 60, time.clock) == pytest.approx(1000.03)
    assert trial.await_healed(looks(view()), FAULTS["kill"], WITNESS, 60, time.clock) is None


def test_a_straggler_is_healed_when_a_step_is_done_and_a_controller_by_the_next_attempt():
    assert not trial.is_healed(view(5), FAULTS["slow"], WITNESS)
    assert trial.is_healed(view(6), FAULTS["slow"], WITNESS)
    controller = replace(WITNESS, target="controller/0")
    assert not trial.is_healed(view(6), FAULTS["controller-kill"], controller)
    assert not trial.is_healed(view(5, "recover", attempt=2), FAULTS["controller-kill"], controller)
    assert trial.is_healed(view(5, "generate", attempt=2), FAULTS["controller-kill"], controller)


def test_a_run_that_ended_is_not_waited_for_unless_a_next_attempt_may_come():
    time = Time()
    assert trial.await_healed(looks(None), FAULTS["kill"], WITNESS, 600, time.clock) is None
    assert time.seconds == pytest.approx(1000 + trial.SILENT_SECONDS, abs=0.1)
    trial.await_healed(looks(None), FAULTS["controller-kill"], WITNESS, 600, time.clock)
    assert time.seconds == pytest.approx(1600 + trial.SILENT_SECONDS, abs=0.2)


def test_members_agree_with_each_other_and_with_the_log():
    assert trial.disagreements(view(), HASHES.get) == []
    ranks = view(policy={"generation": 1, "members": [member(0, step=4), member(1, step=5)]})
    assert trial.disagreements(ranks, HASHES.get) == ["the ranks of policy stand at steps [4, 5]"]
    [problem] = trial.disagreements(view(), {4: "other"}.get)
    assert "step 4 of another history" in problem
    time = Time()
    assert trial.await_agreement(looks(ranks, view()), HASHES.get, 60, time.clock) == []
    assert trial.await_agreement(looks(ranks), HASHES.get, 1, time.clock) != []
