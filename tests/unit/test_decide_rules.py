"""What is decided of what was seen: dead, hung, slow, and everything that only looks so."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.watched import RUN, Watched, policy

from linckia.api.names import actor_name, role_of
from linckia.decide.history import History, learn
from linckia.decide.rules import decide, remember
from linckia.observe.observation import ActorSeen, GroupSeen, MemberSeen, NodeSeen, Observation, RayState

FLOOR, FIRST = 120.0, 1800.0


def dead(name: str, generation: int = 1, rank: int = 0, cause: str = "WORKER_DIED") -> ActorSeen:
    return ActorSeen(actor_name(RUN, name, generation, rank), "DEAD", 4711, "n1", cause, "killed by SIGKILL\nmore")  # type: ignore[arg-type]


# ---- dead ------------------------------------------------------------------------------------------------------------


def test_a_dead_actor_is_restarted_at_once_with_its_cause() -> None:
    run = Watched()
    run.enter("update")
    assert run.look() == []
    run.ray = run.alive(dead("policy", rank=1))
    (decision,) = run.look()
    assert (decision.action, decision.group, decision.generation, decision.kind) == ("restart", "policy", 1, "death")
    assert (decision.signal, decision.stage) == ("WORKER_DIED", "update")
    assert decision.reason == "rank 1 of policy (pid 4711) is dead, WORKER_DIED: killed by SIGKILL"


def test_it_is_decided_once_for_a_generation_and_again_for_the_next() -> None:
    run = Watched()
    run.ray = run.alive(dead("policy"), dead("policy", rank=1))
    assert len(run.look()) == 1
    assert run.looks(600) == []
    run.generations["policy"] = 2
    assert run.looks(60) == [], "the dead of the generation before are none of this one"
    run.ray = run.alive(dead("policy", generation=2))
    assert [decision.generation for decision in run.look()] == [2]


def test_what_is_not_carried_out_is_decided_again() -> None:
    run = Watched()
    run.ray = run.alive(dead("policy"))
    observation = run.observation()
    first = decide(observation, run.policy, run.history, 0.0)
    assert first
    assert decide(observation, run.policy, run.history, 0.0) == first


@pytest.mark.parametrize(
    "actor",
    [
        dead("policy", generation=2),
        dead("critic"),
        replace(dead("policy"), name="other/policy/1/0"),
        replace(dead("policy"), name=f"{RUN}/controller/1/10.0.0.1:80"),
        replace(dead("policy"), name=f"{RUN}/keeper"),
        replace(dead("policy"), state="PENDING_CREATION"),
        replace(dead("policy"), state="RESTARTING"),
    ],
)
def test_other_actors_and_other_states_are_not_deaths(actor: ActorSeen) -> None:
    run = Watched()
    run.ray = run.alive(actor)
    assert run.looks(3600) == []


def test_a_dead_node_takes_every_group_that_has_a_member_on_it() -> None:
    run = Watched({"policy": 2, "reward": 1})
    run.look()
    run.silent = {("policy", 0), ("policy", 1), ("reward", 0)}
    run.ray = run.alive(nodes=(NodeSeen("n2", "10.0.0.2", False), NodeSeen("n1", "10.0.0.1", False, "health check")))
    decisions = run.look()
    assert [(one.group, one.signal) for one in decisions] == [("policy", "NODE_DIED"), ("reward", "NODE_DIED")]
    assert decisions[0].reason == "the node of rank 0 of policy is dead, 10.0.0.1 (n1): health check"


def test_an_api_that_does_not_answer_is_no_death() -> None:
    run = Watched()
    run.busy("update")
    run.ray = RayState(problems=("actors: no answer in 2 s",))
    for _ in range(50):
        run.busy("update")


def test_actors_that_are_not_listed_are_unknown() -> None:
    run = Watched()
    run.ray = RayState((), (), ())
    for _ in range(20):
        run.busy("update")


# ---- hung ------------------------------------------------------------------------------------------------------------


def test_who_waits_to_be_called_is_never_hung() -> None:
    assert Watched().looks(10_000) == []


def test_a_first_step_may_take_long() -> None:
    run = Watched()
    run.enter("update")
    seconds, (decision,) = run.quiet_until_decided()
    assert FIRST < seconds <= FIRST + 10
    assert decision.kind == "hang"
    assert "has stood at 0 in update for 1805 s and it answers its control call" in decision.reason
    assert "the limit is 1800 s: it was not seen before" in decision.reason


def test_the_limit_shrinks_to_the_floor_as_a_stage_turns_out_even() -> None:
    run = Watched()
    waits = []
    for times in (1, 4, 15, 60):
        for _ in range(times):
            run.busy("update", seconds=40)
        probe = Watched(history=run.history, time=run.time)
        probe.progress = dict(run.progress)
        probe.enter("update")
        waits.append(probe.quiet_until_decided()[0])
    assert waits == sorted(waits, reverse=True)
    assert waits[0] <= FIRST + 10
    assert FLOOR < waits[-1] <= FLOOR + 10


def test_a_stage_that_is_slow_now_and_then_gets_a_longer_limit() -> None:
    even, uneven = Watched(), Watched()
    for number in range(20):
        even.busy("update", seconds=40)
        uneven.busy("update", seconds=600 if number % 7 == 3 else 40)
    for run in (even, uneven):
        run.enter("update")
    assert uneven.quiet_until_decided()[0] > 2 * even.quiet_until_decided()[0]


def test_a_wait_that_was_survived_may_come_again() -> None:
    run = Watched()
    for _ in range(60):
        run.busy("update", seconds=40)
    run.enter("update")
    assert run.looks(100) == []
    for key in run.members:
        run.progress[key] += 1
    run.look()
    seconds, _ = run.quiet_until_decided()
    assert seconds > 3 * 100


def test_a_reward_endpoint_that_takes_minutes_is_no_hang() -> None:
    run = Watched({"reward": 1})
    for _ in range(40):
        run.enter("score")
        assert run.looks(300) == []
        run.progress["reward", 0] += 32
        run.enter("idle")
        assert run.look() == []


def test_a_time_limit_of_its_own_comes_first() -> None:
    run = Watched({"reward": 1}, policy=replace(policy(), own_limits={("reward", "score"): 7200.0}))
    run.enter("score")
    seconds, (decision,) = run.quiet_until_decided()
    assert 7200 + FLOOR < seconds < 7200 + FLOOR + 11
    assert "its own time limit of 7200 s comes first" in decision.reason


def test_a_stopped_process_is_found_and_said_not_to_answer() -> None:
    run = Watched()
    for _ in range(60):
        run.busy("update", seconds=40)
    run.enter("update")
    run.look()
    run.silent = {("policy", 1)}
    seconds, (decision,) = run.quiet_until_decided()
    assert FLOOR < seconds <= FLOOR + 10
    assert decision.reason.startswith("rank 1 of policy has stood at"), "not rank 0, which waits for it"
    assert "it has not answered its control call for" in decision.reason


def test_a_stopped_idle_process_is_found() -> None:
    run = Watched()
    for _ in range(60):
        run.busy("update", seconds=40)
    run.silent = {("policy", 0)}
    seconds, (decision,) = run.quiet_until_decided()
    assert seconds <= FIRST + 10
    assert decision.reason.startswith("rank 0 of policy has not answered its control call for")
    assert decision.stage == "idle"


def test_a_silence_in_which_work_goes_on_is_no_hang() -> None:
    run = Watched()
    for _ in range(60):
        run.busy("update", seconds=40)
    run.enter("update")
    for _ in range(20):
        run.silent = {("policy", 0)}
        for key in run.members:
            run.progress[key] += 20
        assert run.looks(100) == []
        run.silent = set()
        assert run.look() == []


def test_while_nobody_answers_nobody_is_blamed() -> None:
    run = Watched()
    for _ in range(60):
        run.busy("update", seconds=40)
    run.enter("update")
    run.look()
    run.silent = set(run.members)
    assert run.looks(FIRST - 10) == []
    assert run.looks(60), "but not for ever"


def test_the_rank_behind_the_others_is_named() -> None:
    run = Watched()
    run.enter("update")
    run.look()
    run.progress["policy", 0] += 3
    run.progress["policy", 1] += 2
    _, (decision,) = run.quiet_until_decided()
    assert decision.reason.startswith("rank 1 of policy has stood at 2 in update")
    assert "others are at 3" in decision.reason


def test_a_member_that_never_answers_is_hung_only_if_it_is_shown_alive() -> None:
    run = Watched({"policy": 1, "reward": 1})
    run.silent = {("policy", 0)}
    run.ray = run.alive(replace(dead("policy"), state="PENDING_CREATION"))
    assert run.looks(3 * FIRST) == [], "it may wait for resources"
    run.ray = RayState(problems=("no answer",))
    assert run.looks(3 * FIRST) == []
    run.ray = None
    (decision,) = run.look()
    assert "has not answered since it was started" in decision.reason


def test_an_old_observation_decides_nothing() -> None:
    run = Watched()
    run.ray = run.alive(dead("policy"))
    observation = run.observation()
    assert decide(observation, run.policy, run.history, FLOOR)
    assert not decide(observation, run.policy, run.history, FLOOR + 1)


def test_it_is_total() -> None:
    nothing = Observation(0.0, RUN, 0, "", (), RayState())
    assert decide(nothing, policy(), Watched().history, 0.0) == []
    run = Watched()
    assert decide(run.observation(), run.policy, run.history, 0.0) == [], "a history that has learned nothing"


# ---- hung in a weight transfer ---------------------------------------------------------------------------------------


def in_transfer(**progress: int) -> Watched:
    """Policy and engines in a sync, having done what is given."""
    run = Watched({"policy": 1, **{name.replace("_", "-"): 1 for name in progress if name != "policy"}})
    run.look()
    run.enter("sync")
    for name, amount in progress.items():
        run.progress[name.replace("_", "-"), 0] += amount
    return run


@pytest.mark.parametrize(
    ("progress", "blamed"),
    [
        ({"policy": 8, "rollout_0": 8, "rollout_1": 7}, "rollout-1"),
        ({"policy": 9, "rollout_0": 8, "rollout_1": 8}, "policy"),
        ({"policy": 8, "rollout_0": 8, "rollout_1": 8}, "policy"),
        ({"policy": 9, "rollout_0": 8}, "rollout-0"),
        ({"policy": 8, "rollout_0": 8}, "policy"),
    ],
)
def test_in_a_transfer_one_is_blamed(progress: dict[str, int], blamed: str) -> None:
    run = in_transfer(**progress)
    _, decisions = run.quiet_until_decided()
    assert [decision.group for decision in decisions] == [blamed]


def test_in_a_transfer_who_does_not_answer_is_blamed() -> None:
    run = in_transfer(policy=9, rollout_0=7, rollout_1=8)
    run.look()
    run.silent = {("rollout-1", 0)}
    _, (decision,) = run.quiet_until_decided()
    assert decision.group == "rollout-1"
    assert "the others of the transfer wait for it" in decision.reason


def test_an_engine_stopped_before_it_was_seen_to_begin_is_blamed() -> None:
    run = in_transfer(policy=1, rollout_0=1, rollout_1=0)
    run.silent = {("rollout-1", 0)}
    run.stages["rollout-1", 0] = "idle"
    _, (decision,) = run.quiet_until_decided()
    assert decision.group == "rollout-1"


def test_after_a_restart_those_who_waited_get_their_time_again() -> None:
    run = in_transfer(policy=8, rollout_0=8, rollout_1=7)
    first, (one,) = run.quiet_until_decided()
    second, (other,) = run.quiet_until_decided()
    assert (one.group, other.group) == ("rollout-1", "policy")
    assert second > 0.9 * first


def test_a_restart_that_takes_long_puts_no_blame_on_those_who_are_not_late() -> None:
    run = in_transfer(policy=8, rollout_0=8, rollout_1=7)
    run.quiet_until_decided()
    for _ in range(100):
        run.progress["policy", 0] += 1
        run.progress["rollout-0", 0] += 1
        assert run.looks(100) == []


def test_what_waited_for_another_teaches_nothing() -> None:
    run = in_transfer(policy=8, rollout_0=8, rollout_1=7)
    run.quiet_until_decided()
    run.generations["rollout-1"] = 2
    run.enter("idle")
    run.look()
    assert not [key for key in run.history.times if key[1] == "sync"]


# ---- slow ------------------------------------------------------------------------------------------------------------


def generate(run: Watched, steps: int, slower: float) -> list[object]:
    """Two engines that generate; the second is ``slower`` times slower. All that is decided meanwhile."""
    found: list[object] = []
    for _ in range(steps):
        run.step += 1
        run.enter("generate")
        for look in range(12):
            run.progress["rollout-0", 0] += 60
            run.progress["rollout-1", 0] += round(60 / slower) + look % 2
            found += run.look()
        run.enter("idle")
        found += run.look()
    return found


def test_a_straggler_is_reported_once_with_its_factor() -> None:
    run = Watched({"rollout-0": 1, "rollout-1": 1})
    (decision,) = generate(run, 40, slower=3)
    assert (decision.action, decision.group, decision.kind) == ("report", "rollout-1", "slow")  # type: ignore[attr-defined]
    assert "rank 0 of rollout-1 has been 2.9 times slower than its peers in generate" in decision.reason  # type: ignore[attr-defined]


def test_a_straggler_is_replaced_where_that_is_asked_for() -> None:
    run = Watched({"rollout-0": 1, "rollout-1": 1}, policy=policy(replace_stragglers=True))
    (decision,) = generate(run, 40, slower=3)
    assert decision.action == "restart"  # type: ignore[attr-defined]
    run.generations["rollout-1"] = 2
    assert generate(run, 40, slower=1) == [], "the next generation starts without a past"


def test_a_little_slower_is_no_straggler() -> None:
    run = Watched({"rollout-0": 1, "rollout-1": 1})
    assert generate(run, 60, slower=1.5) == []


def test_a_few_slow_steps_are_no_straggler() -> None:
    run = Watched({"rollout-0": 1, "rollout-1": 1})
    assert generate(run, 4, slower=5) == []
    assert generate(run, 30, slower=1) == []


def test_a_reported_straggler_that_hangs_is_restarted() -> None:
    run = Watched({"rollout-0": 1, "rollout-1": 1})
    assert generate(run, 40, slower=3)
    run.stages["rollout-1", 0] = "generate"
    _, (decision,) = run.quiet_until_decided()
    assert (decision.action, decision.kind) == ("restart", "hang")


# ---- whatever is seen ------------------------------------------------------------------------------------------------

stages = st.sampled_from(["idle", "update", "sync", "send_weights", "start", "a stage nobody knows"])
member_states = st.tuples(st.booleans(), stages, st.integers(-5, 10**9))
looks = st.lists(
    st.tuples(
        st.floats(0, 10_000),
        st.integers(1, 3),
        st.lists(member_states, min_size=3, max_size=3),
        st.sampled_from(["alive", "dead", "silent", "empty"]),
    ),
    max_size=12,
)


@given(looks)
def test_any_sequence_of_looks_has_an_answer(sequence: list[Any]) -> None:
    history, time = History(), 0.0
    for seconds, generation, members, ray in sequence:
        time += seconds
        groups = tuple(
            GroupSeen(name, role_of(name), generation, 1, (MemberSeen(0, *one, 1, "n1"),))
            for name, one in zip(("policy", "rollout-0", "rollout-1"), members, strict=True)
        )
        actors = {
            "alive": (replace(dead("policy", generation), state="ALIVE"),),
            "dead": (dead("policy", generation),),
            "silent": None,
            "empty": (),
        }[ray]
        observation = Observation(time, RUN, 1, "update", groups, RayState(actors))
        history = learn(history, observation)
        decisions = decide(observation, policy(), history, time)
        assert len({one.group for one in decisions}) == len(decisions)
        for decision in decisions:
            name = decision.group
            answered, stage, _ = members[("policy", "rollout-0", "rollout-1").index(name)]
            assert decision.kind == "death" or not (answered and stage == "idle")
            history = remember(history, decision, time)
        repeated = decide(observation, policy(), history, time)
        assert not {one.group for one in repeated} & {one.group for one in decisions if one.action == "restart"}
