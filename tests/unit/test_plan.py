import io
import json

import pytest
from rich.console import Console

from linckia.api.config import Inference, RunConfig
from linckia.api.errors import UserError
from linckia.api.plan import check_fits, in_node_order, plan, plan_group
from linckia.api.plan_view import plan_to_json, render_plan

NODE_8 = {"CPU": 96.0, "GPU": 8.0, "memory": 1e12, "node:10.0.0.1": 1.0}
NODE_2 = {"CPU": 16.0, "GPU": 2.0, "memory": 1e11}


def config(**sections):
    reward = sections.pop("reward", {})
    sections.setdefault("data", {"prompts_per_step": 128})
    sections["data"]["train"] = {"file": "/p.jsonl"}
    source = {} if "function" in reward else {"model": "/reward"}
    return RunConfig.model_validate({"model": {"path": "/m"}, "reward": {**source, **reward}, **sections})


def members(nodes, per_node, **keys):
    return {"num_nodes": nodes, "num_gpus_per_node": per_node, "micro_batch_size": 4, **keys}


HYBRID = {
    **{role: members(1, 8) for role in ("policy", "critic", "reference", "reward")},
    "rollout": {"engines": 4, "tensor_parallel_size": 2},
    "placement": {"colocation": "all"},
}
EIGHT_BY_TWO = {
    **{role: members(2, 2) for role in ("policy", "critic")},
    **{role: members(1, 2) for role in ("reference", "reward")},
    "rollout": {"engines": 2, "tensor_parallel_size": 2},
}


def load_of_bundles(result):
    """(placement group, bundle) -> what the members in it take together."""
    taken = {}
    for group in result.groups:
        for member in group.members:
            for bundle in member.bundles:
                slot = taken.setdefault((member.placement_group, bundle), {"GPU": 0.0, "CPU": 0.0, "memory": 0.0})
                slot["GPU"] += member.worker_gpus if member.worker_bundles else member.gpus
                slot["CPU"] += member.cpus
                slot["memory"] += member.memory_bytes
    return taken


def assert_everyone_fits(result):
    bundles = {(group.key, index): b for group in result.placement_groups for index, b in enumerate(group.bundles)}
    taken = load_of_bundles(result)
    assert taken.keys() == bundles.keys()
    for slot, amounts in taken.items():
        for name, amount in amounts.items():
            assert amount <= bundles[slot].get(name, 0.0) + 1e-9, (slot, name)


def test_a_group_of_any_role_is_planned_as_the_built_in_ones():
    group = Inference.model_validate({**members(2, 2), "resources": {"cpus": 3, "custom": {"fast_disk": 1}}})
    settings = config(placement={"strategy": "SPREAD"})
    on_cpus = plan_group(settings, "length", group, gpus=False)
    assert_everyone_fits(on_cpus)
    [placed] = on_cpus.placement_groups
    assert (placed.key, placed.strategy, placed.roles) == ("length", "SPREAD", ("length",))
    assert placed.bundles == ({"CPU": 3.0, "fast_disk": 1.0},) * 4
    assert [member.rank for member in on_cpus.group("length").members] == [0, 1, 2, 3]
    assert on_cpus.group("length").members_per_node == 2
    assert plan_group(settings, "length", group, gpus=True).totals["GPU"] == 4.0
    with pytest.raises(UserError, match=r"^length\.resources\.gpus"):
        plan_group(settings, "length", Inference.model_validate({"resources": {"gpus": 1.5}}), gpus=True)


def test_hybrid_node_of_8_gpus():
    result = plan(config(**HYBRID), gpus=True)
    [group] = result.placement_groups
    assert group.bundles == ({"CPU": 5.0, "GPU": 1.0},) * 8
    assert result.totals == {"CPU": 40.0, "GPU": 8.0}
    assert [member.gpus for member in result.group("policy").members] == [0.2] * 8
    engines = [result.group(f"rollout-{n}").members[0] for n in range(4)]
    assert [engine.worker_bundles for engine in engines] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(engine.bundle, engine.gpus, engine.worker_gpus) for engine in engines][:2] == [
        (0, 0.0, 0.2),
        (2, 0.0, 0.2),
    ]
    assert_everyone_fits(result)
    check_fits(result, [NODE_8])


def test_8_nodes_of_2_gpus_separate():
    result = plan(config(**EIGHT_BY_TWO), gpus=True)
    assert result.totals["GPU"] == 16
    assert [len(group.members) for group in result.groups] == [4, 4, 2, 2, 1, 1]
    # Engines of two devices need a node to themselves, so they are placed while nodes are empty.
    placed = [(group.key, group.strategy, len(group.bundles)) for group in result.placement_groups]
    assert placed[:2] == [("rollout-0", "STRICT_PACK", 2), ("rollout-1", "STRICT_PACK", 2)]
    assert placed[2:] == [("policy", "PACK", 4), ("critic", "PACK", 4), ("reference", "PACK", 2), ("reward", "PACK", 2)]
    assert result.group("policy").members_per_node == 2
    assert_everyone_fits(result)
    check_fits(result, [NODE_2] * 8)


def test_role_of_4_cpus_half_a_gpu_and_16_gb():
    resources = {"cpus": 4, "gpus": 0.5, "memory": "16GB", "custom": {"fast_disk": 1}, "threads": 4}
    result = plan(config(reference={"resources": resources}), gpus=True)
    [member] = result.group("reference").members
    assert (member.cpus, member.gpus, member.memory_bytes, member.threads) == (4, 0.5, 16 * 10**9, 4)
    [group] = [group for group in result.placement_groups if group.key == "reference"]
    assert group.bundles == ({"CPU": 4.0, "GPU": 0.5, "memory": 16e9, "fast_disk": 1.0},)


def test_on_cpus_nothing_takes_a_gpu():
    result = plan(config(policy={"resources": {"gpus": 0.5}}, rollout={"engines": 2}), gpus=False)
    assert result.totals == {"CPU": 6.0}
    assert not any(group.uses_gpus for group in result.placement_groups)


def test_a_python_reward_takes_no_gpu_and_is_placed_last():
    result = plan(config(reward={"function": "/r.py:f", **members(1, 2)}), gpus=True)
    assert [member.gpus for member in result.group("reward").members] == [0.0, 0.0]
    assert [group.uses_gpus for group in result.placement_groups] == [True] * 4 + [False]
    assert result.placement_groups[-1].key == "reward"
    asked = plan(config(reward={"function": "/r.py:f", "resources": {"gpus": 0.25}}), gpus=True)
    assert asked.group("reward").members[0].gpus == 0.25


def test_groups_that_are_not_needed_are_not_there():
    algorithm = {"name": "grpo", "kl": {"coefficient": 0}}
    data = {"prompts_per_step": 16, "samples_per_prompt": 8}
    result = plan(config(algorithm=algorithm, data=data), gpus=False)
    assert [group.name for group in result.groups] == ["policy", "reward", "rollout-0"]
    with pytest.raises(StopIteration):
        result.group("critic")


@pytest.mark.parametrize(
    ("colocation", "pair"), [("policy_reference", ("policy", "reference")), ("critic_reward", ("critic", "reward"))]
)
def test_pairs_share_bundles_one_to_one(colocation, pair):
    sections = {role: members(1, 2) for role in pair}
    result = plan(config(placement={"colocation": colocation}, **sections), gpus=True)
    [shared] = [group for group in result.placement_groups if group.key == "+".join(pair)]
    assert shared.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 2
    for role in pair:
        assert [(m.bundle, m.gpus, m.placement_group) for m in result.group(role).members] == [
            (0, 0.5, shared.key),
            (1, 0.5, shared.key),
        ]
    assert_everyone_fits(result)


def test_pairs_of_other_sizes_are_refused():
    with pytest.raises(UserError, match="2 x 2 and reference has 1 x 1") as caught:
        plan(config(placement={"colocation": "policy_reference"}, policy=members(2, 2)), gpus=True)
    assert caught.value.field == "placement.colocation"


def test_a_critic_beside_a_python_reward_has_the_device_alone():
    result = plan(config(placement={"colocation": "critic_reward"}, reward={"function": "/r.py:f"}), gpus=True)
    assert result.group("critic").members[0].gpus == 1.0
    assert result.group("reward").members[0].gpus == 0.0


def test_shares_never_add_up_to_more_than_a_device():
    sections = {**HYBRID, "algorithm": {"kl": {"coefficient": 0}}, "policy": members(1, 8, resources={"gpus": 0.3})}
    result = plan(config(**sections), gpus=True)
    assert result.group("policy").members[0].gpus == 0.3
    assert result.group("critic").members[0].gpus == 0.2333  # (1 - 0.3) / 3, rounded down to Ray's precision
    assert_everyone_fits(result)


def test_groups_of_several_sizes_in_one_placement_group():
    sections = {"policy": members(1, 2), "rollout": {"engines": 3}, "placement": {"colocation": "all"}}
    result = plan(config(**sections), gpus=True)
    [group] = result.placement_groups
    assert [bundle["CPU"] for bundle in group.bundles] == [5.0, 2.0, 1.0]
    assert [bundle["GPU"] for bundle in group.bundles] == [1.0, 1.0, 1.0]
    assert_everyone_fits(result)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_strategies(strategy):
    result = plan(config(placement={"strategy": strategy}, rollout={"engines": 2}), gpus=True)
    assert {group.strategy for group in result.placement_groups} == {strategy}
    resources = {"resources": {"strategy": strategy}}
    result = plan(config(critic=resources, rollout={"tensor_parallel_size": 2, **resources}), gpus=True)
    strategies = {group.key: group.strategy for group in result.placement_groups}
    assert strategies == {
        "policy": "PACK", "critic": strategy, "reference": "PACK", "reward": "PACK", "rollout-0": strategy,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({**HYBRID, "policy": members(1, 8, resources={"gpus": 1})}, "would get nothing"),
        ({**HYBRID, "policy": members(1, 8, resources={"gpus": 2})}, "at most 1 GPU"),
        ({"policy": {"resources": {"gpus": 1.5}}}, "splits no second GPU"),
        ({"rollout": {"resources": {"gpus": 2}}}, "per device"),
        ({"reward": {"function": "/r.py:f", "resources": {"cpus": 0}}}, "cannot be placed"),
        (
            {
                **HYBRID,
                "policy": members(1, 8, resources={"strategy": "PACK"}),
                "critic": members(1, 8, resources={"strategy": "SPREAD"}),
            },
            "want PACK, SPREAD",
        ),
    ],
)
def test_plans_that_contradict_themselves(sections, words):
    with pytest.raises(UserError, match=words):
        plan(config(**sections), gpus=True)


# ---- node order --------------------------------------------------------------------------------------------------


def test_ranks_come_out_in_node_order():
    result = plan(config(policy=members(2, 2)), gpus=True)
    nodes = {group.key: ["a"] * len(group.bundles) for group in result.placement_groups} | {
        "policy": ["b", "a", "b", "a"]
    }
    ordered = in_node_order(result, nodes)
    assert [(member.rank, member.bundle) for member in ordered.group("policy").members] == [
        (0, 1),
        (1, 3),
        (2, 0),
        (3, 2),
    ]
    assert ordered.group("critic") == result.group("critic")


def test_devices_of_one_engine_come_out_on_one_node():
    sections = {**HYBRID, "policy": members(2, 4), "reward": members(1, 2)}
    result = plan(config(**sections), gpus=True)
    ordered = in_node_order(result, {"all": ["b", "a", "b", "a", "b", "a", "b", "a"]})
    engines = [ordered.group(f"rollout-{n}").members[0] for n in range(4)]
    assert [engine.worker_bundles for engine in engines] == [(1, 3), (5, 7), (0, 2), (4, 6)]
    assert [engine.bundle for engine in engines] == [1, 5, 0, 4]
    assert [member.bundle for member in ordered.group("policy").members] == [1, 3, 5, 7, 0, 2, 4, 6]
    assert [member.bundle for member in ordered.group("reward").members] == [1, 0]  # within its own two slots
    assert_everyone_fits(ordered)


# ---- against a cluster -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "nodes", "words"),
    [
        (
            EIGHT_BY_TWO,
            [NODE_2] * 4,
            ["needs 16 GPU", "policy 4, critic 4", "has 8", "4 nodes of 2 GPU, 16 CPU, 100 GB"],
        ),
        ({"policy": {"resources": {"custom": {"fast_disk": 1}}}}, [NODE_8], ["needs 1 fast_disk", "has 0"]),
        ({"policy": {"resources": {"memory": "200GB"}}}, [NODE_2] * 8, ["of policy", "no node", "200 GB memory"]),
        ({"rollout": {"tensor_parallel_size": 4}}, [NODE_2] * 8, ["STRICT_PACK", "rollout.resources.strategy to PACK"]),
        (
            {"policy": members(1, 4), "placement": {"strategy": "STRICT_SPREAD"}},
            [NODE_8, NODE_8],
            ["STRICT_SPREAD wants 4 bundles on 4 nodes and 2"],
        ),
        (
            # 8 GPUs and 32 CPUs are enough in all; a node's CPUs end before its GPUs do.
            {"policy": members(1, 4, resources={"cpus": 5})},
            [{"CPU": 8.0, "GPU": 2.0}] * 4 + [{"CPU": 32.0}],
            [],
        ),
        (
            {"policy": members(1, 4, resources={"cpus": 5})},
            [{"CPU": 8.0, "GPU": 4.0}] * 2 + [{"CPU": 32.0}],
            ["4 bundles of at least 1 GPU, 5 CPU", "holds 2", "2 are missing"],
        ),
        (EIGHT_BY_TWO, [], ["the cluster has no node"]),
    ],
)
def test_what_can_never_fit_is_refused(sections, nodes, words):
    result = plan(config(**sections), gpus=True)
    if not words:
        check_fits(result, nodes)
        return
    with pytest.raises(UserError) as caught:
        check_fits(result, nodes)
    for word in words:
        assert word in str(caught.value)


def test_the_plan_for_people_and_programs():
    result = plan(config(**HYBRID), gpus=True)
    text = io.StringIO()
    Console(file=text, width=160).print(render_plan(result))
    for words in ("policy", "0.2 GPU, 1 CPU", "2 x (0.2 GPU, 1 CPU)", "6-7", "PACK", "In all: 8 GPU, 40 CPU"):
        assert words in text.getvalue()
    data = json.loads(json.dumps(plan_to_json(result)))
    assert data["totals"]["GPU"] == 8
    assert data["groups"][-1]["members"][0]["worker_bundles"] == [6, 7]
