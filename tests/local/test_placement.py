"""Plans placed for real on one Ray node with 8 logical GPUs, by members that hold no model."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from local import light
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, UserError
from linckia.api.names import NAMESPACE
from linckia.api.plan import Plan, plan
from linckia_trainer.groups import placement
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.placement import Placed

GB = 10**9


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One node of 8 GPUs, 48 CPUs, 200 GB and 4 of a custom resource."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_gpus=8,
        num_cpus=48,
        _memory=200 * GB,
        resources={"fast_disk": 4},
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    light.shut_down()
    patch.undo()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    light.await_empty()


def placed_members(config: RunConfig, *names: str) -> tuple[Plan, Placed, dict[str, ActorGroup]]:
    ordered, placed = placement.place(plan(config, gpus=True), "placed", 20)
    wanted = names or tuple(group.name for group in ordered.groups)
    return ordered, placed, {name: light.start_one(ordered.group(name), placed, "placed") for name in wanted}


def remove(groups: dict[str, ActorGroup], placed: Placed) -> None:
    for group in groups.values():
        group.kill()
    placement.release(placed)


def test_hybrid_four_roles_of_8_and_4_engines_of_2_share_8_devices() -> None:
    roles = ("policy", "critic", "reference", "reward")
    config = light.config(
        **{role: light.members(1, 8) for role in roles},
        rollout={"engines": 4, "tensor_parallel_size": 2},
        placement={"colocation": "all"},
    )
    ordered, placed, groups = placed_members(config)
    found = light.where(groups.values())
    for role in roles:
        assert [one["rank"] for one in found[role]] == list(range(8))
        assert [one["gpus"] for one in found[role]] == [[str(device)] for device in range(8)], role
        assert all(one["resources"] == {"CPU": 1.0, "GPU": 0.2} for one in found[role])
    devices = []
    for engine in range(4):
        member = ordered.group(f"rollout-{engine}").members[0]
        [one] = found[f"rollout-{engine}"]
        assert one["gpus"] == []  # its workers have them
        assert one["environment"] == {
            "VLLM_RAY_BUNDLE_INDICES": f"{2 * engine},{2 * engine + 1}",
            "VLLM_RAY_PER_WORKER_GPUS": "0.2",
        }
        devices += [device for _, [device] in light.worker_devices(member, placed)]
    assert devices == [str(device) for device in range(8)]
    assert ray.available_resources().get("GPU", 0) == 0  # all eight are the run's and nobody else's
    remove(groups, placed)


def test_a_role_at_4_cpus_half_a_gpu_and_16_gb() -> None:
    config = light.config(
        policy=light.members(1, 2, resources={"cpus": 4, "gpus": 0.5, "memory": "16GB"}),
        critic=light.members(1, 1, resources={"custom": {"fast_disk": 1.5}}),
        reward={"function": "r.py:reward"},
    )
    _, placed, groups = placed_members(config, "policy", "critic", "reward")
    found = light.where(groups.values())
    for one in found["policy"]:
        assert one["resources"] == {"CPU": 4.0, "GPU": 0.5, "memory": 16.0 * GB}
    assert [one["gpus"] for one in found["policy"]] == [["0"], ["0"]]  # two halves of one
    assert found["critic"][0]["resources"] == {"CPU": 1.0, "GPU": 1.0, "fast_disk": 1.5}
    assert found["reward"][0]["resources"] == {"CPU": 1.0}  # a function needs no GPU
    remove(groups, placed)


@pytest.mark.parametrize("pair", [("policy", "reference"), ("critic", "reward")])
def test_two_roles_share_devices_one_to_one(pair: tuple[str, str]) -> None:
    config = light.config(**{role: light.members(1, 2) for role in pair}, placement={"colocation": "_".join(pair)})
    ordered, placed, groups = placed_members(config, *pair)
    found = light.where(groups.values())
    first, second = ([one["gpus"] for one in found[role]] for role in pair)
    assert first == second
    assert len({device for [device] in first}) == 2
    assert all(one["resources"]["GPU"] == 0.5 for role in pair for one in found[role])
    others = {member.placement_group for group in ordered.groups if group.name not in pair for member in group.members}
    assert "+".join(pair) not in others  # nobody else is in their bundles
    remove(groups, placed)


@pytest.fixture
def held() -> Iterator[PlacementGroup]:
    """Somebody else's placement group with 5 GPUs, and an actor with one more."""
    group = placement_group([{"GPU": 5}], name="others/pg/0", lifetime="detached")
    assert group.wait(10)
    actor = light.Holder.options(name="a-notebook", num_gpus=1).remote()  # type: ignore[attr-defined]
    ray.get(actor.ping.remote())
    yield group
    ray.kill(actor)
    remove_placement_group(group)


def test_the_time_limit_says_what_is_missing_and_who_holds_it(held: PlacementGroup) -> None:
    wanted = light.config(policy=light.members(1, 4), algorithm={"name": "grpo", "kl": {"coefficient": 0}},
                          data={"prompts_per_step": 16, "samples_per_prompt": 2}, reward={"function": "r.py:reward"})  # fmt: skip
    before = set(placement_group_table())
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        placement.place(plan(wanted, gpus=True), "placed", 1)
    waited = time.monotonic() - began
    text = str(error.value)
    assert error.value.field == "placement.timeout"
    assert "policy (PACK): 4 x {CPU: 1, GPU: 1}" in text
    assert "reward (PACK): 1 x {CPU: 1}" in text  # not asked for before the GPU groups stand
    assert "The cluster has {CPU: 48, GPU: 8, fast_disk: 4, memory GB: 200}" in text
    assert "GPU: 1}" in text
    assert "placement group others/pg/0 {GPU: 5}" in text
    assert "tasks and actors outside placement groups {CPU: 1, GPU: 1}; the cluster's named actors: a-notebook" in text
    assert 1 <= waited < 15
    ours = [entry for key, entry in placement_group_table().items() if key not in before]
    light.await_true(lambda: all(placement_group_table_state(entry) == "REMOVED" for entry in ours))


def placement_group_table_state(entry: dict[str, str]) -> str:
    state: str = placement_group_table()[entry["placement_group_id"]]["state"]
    return state


def test_what_can_never_fit_is_refused_at_once() -> None:
    before = set(placement_group_table())
    config = light.config(policy=light.members(1, 4), critic=light.members(1, 8))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"the run needs 15 GPU \(.*critic 8.*\) and the cluster has 8"):
        placement.place(plan(config, gpus=True), "placed", 60)
    large = light.config(policy=light.members(1, 1, resources={"memory": "300GB"}))
    with pytest.raises(UserError, match="memory"):
        placement.place(plan(large, gpus=True), "placed", 60)
    assert time.monotonic() - began < 15
    assert set(placement_group_table()) == before


def four_members(orphan_timeout: float = 900) -> tuple[ActorGroup, Placed]:
    config = light.config(policy=light.members(1, 4), reward={"function": "r.py:reward"})
    ordered, placed = placement.place(plan(config, gpus=False), "placed", 20)
    return light.start_one(ordered.group("policy"), placed, "placed", attempt=2, orphan_timeout=orphan_timeout), placed


def test_a_sharded_call_counts_each_set_of_members_once() -> None:
    group, placed = four_members()
    batch = {"lengths": np.array([5, 1, 4, 2, 3], np.int32)}
    for duplicates, shards in ((1, 4), (2, 2), (4, 1)):
        pairs = ActorGroup(group.name, group.members, group.attempt, group.generation, duplicates)
        call = pairs.call_sharded("double", batch, by=2)
        assert len(call.refs) == 4  # all members work
        assert [int(one["rank"][0]) for one in call.results()] == list(
            range(0, 4, duplicates)
        )  # and one of a set counts
        assert pairs.num_shards == shards
        assert call.rows_joined()["doubled"].tolist() == [10, 2, 8, 4, 6]
    remove({"policy": group}, placed)


def test_members_refuse_lower_attempts_other_generations_and_everything_once_fenced() -> None:
    group, placed = four_members()
    first = group.members[0]

    def invoke(attempt: int, generation: int) -> Any:
        return ray.get(first.invoke.remote(attempt, generation, "where"))

    assert invoke(2, 1)["rank"] == 0
    for attempt, generation, reason in ((1, 1, "attempt 1 was replaced by attempt 2"), (2, 2, "as generation 2")):
        with pytest.raises(FencedError, match=reason):
            invoke(attempt, generation)
    with pytest.raises(FencedError):
        ray.get(first.status.remote(1))
    running = first.invoke.remote(2, 1, "wait_for_attempt", 3)
    light.await_true(lambda: ray.get(first.status.remote(2))["stage"] == "wait_for_attempt")
    assert ray.get(first.status.remote(3))["pid"] > 0  # a new attempt arrives, and is answered while a call runs
    assert ray.get(running, timeout=60) == 3  # the call that was running is left to finish
    with pytest.raises(FencedError, match="attempt 2 was replaced by attempt 3"):
        invoke(2, 1)
    ray.get(first.fence.remote(3))
    with pytest.raises(FencedError, match="is fenced"):
        invoke(3, 1)
    remove({"policy": group}, placed)


def test_members_nobody_calls_exit_by_themselves() -> None:
    group, placed = four_members(orphan_timeout=3)
    heard, *forgotten = group.members
    ray.get([member.status.remote(2) for member in group.members])

    def gone(member: Any) -> bool:
        try:
            ray.get(member.__ray_ready__.remote(), timeout=5)
        except ray.exceptions.RayActorError:
            return True
        return False

    def only_one_is_left() -> bool:
        assert ray.get(heard.status.remote(2))["rank"] == 0  # the one that hears of its attempt stays
        return all(gone(member) for member in forgotten)

    light.await_true(only_one_is_left)
    assert not gone(heard)
    remove({"policy": group}, placed)


def test_placement_groups_are_numbered_on_and_removed_by_run() -> None:
    config = light.config(reward={"function": "r.py:reward"})
    planned = plan(config, gpus=False)
    names = []
    for run in ("a", "a", "b"):
        placement.place(planned, run, 20)
        names.append({entry["name"] for entry in placement_group_table().values() if entry["state"] == "CREATED"})
    groups = len(planned.placement_groups)
    assert names[1] == {f"a/pg/{n}" for n in range(2 * groups)}
    placement.remove_standing("a")
    standing = {entry["name"] for entry in placement_group_table().values() if entry["state"] == "CREATED"}
    assert standing == {f"b/pg/{n}" for n in range(groups)}
    placement.remove_standing("b")
