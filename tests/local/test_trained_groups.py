"""Policy, critic and reference as real DeepSpeed groups on recorded experience: one rank and two, ZeRO 0, 2 and 3."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from local import light, trained
from local.trained import Batch, World
from torch import nn
from transformers import AutoModelForCausalLM

from linckia.api.names import NAMESPACE
from linckia_trainer.experience.batching import shard
from linckia_trainer.groups.engine_errors import NonFiniteError
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.state.export import export_checkpoint

# torch reads the numbers of a read-only array here, and writes none.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

STAGES = (0, 2, 3)
TOLERANCE = 1e-5
LR = 1e-3


def zero(stage: int, **keys: Any) -> dict[str, dict[str, Any]]:
    group = {"zero_stage": stage, "optimizer": {"lr": LR}, **keys}
    return {"policy": group, "critic": dict(group)}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, World]]:
    """All groups of this file: each process starts once and loads one config after another."""
    folder = tmp_path_factory.mktemp("trained")
    ray.init(
        address="local",
        num_cpus=16,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    standing = {
        1: trained.stand(folder, 1, ("policy", "critic", "reference")),
        2: trained.stand(folder, 2, ("policy", "critic")),
    }
    yield standing
    for world in standing.values():
        world.remove()
    light.await_empty()
    light.shut_down()


@pytest.fixture(scope="module")
def records(worlds: dict[int, World]) -> list[Batch]:
    """Two records; the second is scored by the same model, so that its ratios are not 1 when it is applied."""
    worlds[1].load("records", **zero(2))
    return [trained.recorded(worlds[1], seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def golden(worlds: dict[int, World], records: list[Batch]) -> dict[tuple[int, int], dict[str, Any]]:
    """Metrics of both records and the hashes after each, with every state saved, by (ZeRO stage, ranks)."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for ranks, world in worlds.items():
        for stage in STAGES:
            world.load(f"zero-{stage}", **zero(stage))
            world.save()
            metrics, hashes = [], [world.hashes()]
            for step, record in enumerate(records, start=1):
                metrics.append(world.apply(record, step))
                hashes.append(world.hashes())
                if step == 1:
                    world.save()
            found[stage, ranks] = {"metrics": metrics, "hashes": hashes, "weights": weights(world)}
    return found


def weights(world: World) -> Batch:
    whole: Batch = world.groups["policy"].call("weights")[0]
    return whole


def model(world: World) -> nn.Module:
    assert world.config is not None
    lm: nn.Module = AutoModelForCausalLM.from_pretrained(world.config.model.path, dtype=torch.float32)
    return lm


def direct_log_probs(lm: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) [N, T] straight from the model's logits."""
    tokens = torch.tensor(batch["tokens"], dtype=torch.int64)
    everything = torch.log_softmax(lm(input_ids=tokens).logits[:, :-1].float(), -1)
    chosen = everything.gather(2, tokens[:, 1:, None]).squeeze(-1)
    entropies = -(everything.exp() * everything).sum(-1)
    return nn.functional.pad(chosen, (1, 0)), nn.functional.pad(entropies, (1, 0))


def close(one: Batch, other: Batch, tolerance: float = LR / 20) -> None:
    """Parameters: where a gradient is next to nothing AdamW makes a step of rounding, so the tolerance is one in steps."""
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=tolerance, rtol=0, err_msg=name)


def same_metrics(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == pytest.approx(other[name], abs=TOLERANCE, rel=TOLERANCE), name


def test_log_probs_are_those_of_the_model_itself(worlds: dict[int, World]) -> None:
    batch = trained.experience(5)
    worlds[1].load("direct", rollout={"temperature": 1.0})
    scores = worlds[1].score(batch)
    with torch.no_grad():
        expected = direct_log_probs(model(worlds[1]), batch)[0].numpy() * batch["loss_mask"]
    assert (batch["loss_mask"].sum(1) >= 2).all()
    np.testing.assert_allclose(scores["old_log_probs"], expected, atol=TOLERANCE)
    np.testing.assert_allclose(scores["reference_log_probs"], expected, atol=TOLERANCE)
    assert (scores["values"][batch["loss_mask"] == 0] == 0).all()
    assert np.ptp(scores["values"][batch["loss_mask"] == 1]) > 0


def test_an_update_is_the_one_that_plain_torch_makes(
    worlds: dict[int, World], records: list[Batch], golden: Any
) -> None:
    lm = model(worlds[1])
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for record, metrics in zip(records, golden[2, 1]["metrics"], strict=True):
        mask = torch.tensor(record["loss_mask"], dtype=torch.bool)
        old, reference, advantages = (
            torch.tensor(record[name])[mask] for name in ("old_log_probs", "reference_log_probs", "advantages")
        )
        log_probs, entropies = (column[mask] for column in direct_log_probs(lm, record))
        ratio = (log_probs - old).exp()
        clipped = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        difference = reference - log_probs
        penalty = (difference.exp() - 1 - difference).mean()
        (clipped - 0.01 * entropies.mean() + 0.1 * penalty).backward()
        norm = nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        assert metrics["policy/loss"] == pytest.approx(clipped.item(), abs=TOLERANCE)
        assert metrics["policy/kl"] == pytest.approx(penalty.item(), abs=TOLERANCE)
        assert metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 1.0  # the clipping was at work
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach().numpy() for name, value in lm.named_parameters()}
    close(golden[2, 1]["weights"], expected)
    start = {name: value.detach().numpy() for name, value in model(worlds[1]).named_parameters()}
    assert max(np.abs(expected[name] - start[name]).max() for name in start) > LR  # and it went somewhere


def test_stages_and_ranks_agree(golden: dict[tuple[int, int], dict[str, Any]]) -> None:
    first = golden[0, 1]
    for found in golden.values():
        for mine, theirs in zip(found["metrics"], first["metrics"], strict=True):
            same_metrics(mine, theirs)
        close(found["weights"], first["weights"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_restored_and_applied_gives_the_same_bits(
    stage: int,
    ranks: int,
    worlds: dict[int, World],
    records: list[Batch],
    golden: dict[tuple[int, int], dict[str, Any]],
) -> None:
    world, hashes = worlds[ranks], golden[stage, ranks]["hashes"]
    assert len({str(one) for one in hashes}) == 3
    for tier in ("node_memory", "run_directory"):
        world.load(f"zero-{stage}", **zero(stage))  # new engines
        assert world.hashes() == hashes[0]
        assert world.restore(tier) == [1, 1]
        assert world.hashes() == hashes[1]
        metrics = world.apply(records[1], 2)
        assert world.hashes() == hashes[2]
        assert metrics == golden[stage, ranks]["metrics"][1]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_exported_state_of_two_ranks_loads_in_transformers(
    stage: int, worlds: dict[int, World], golden: dict[tuple[int, int], dict[str, Any]], tmp_path: Path
) -> None:
    world = worlds[2]
    world.load(f"zero-{stage}", **zero(stage))
    world.restore()
    expected = weights(world)
    assert world.config is not None
    assert export_checkpoint(world.config.run.dir, {}, None, tmp_path / "out") == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found = {name: value.detach().numpy() for name, value in loaded.named_parameters()}
    close(found, expected, tolerance=0.0)
    start = dict(model(world).named_parameters())
    assert any((start[name].detach().numpy() != found[name]).any() for name in found)


def test_a_record_is_applied_once_and_only_after_its_own_past(worlds: dict[int, World], records: list[Batch]) -> None:
    world = worlds[1]
    world.load("once", **zero(2))
    before = world.hashes()
    wrong = {"step": 1, "previous": "1" * 64, "log_hash": "2" * 64, "kl_coefficient": 0.1}
    for name in ("policy", "critic"):
        with pytest.raises(GroupLostError, match="not before 1"):
            world.groups[name].call_sharded("apply_record", records[0], **wrong).results()
    assert world.hashes() == before
    metrics = world.apply(records[0], 1)
    once = world.hashes()
    assert metrics
    assert world.apply(records[0], 1) == metrics  # said again, not made again
    assert world.hashes() == once != before


def test_a_skipped_step_moves_only_the_place_in_the_log(worlds: dict[int, World], records: list[Batch]) -> None:
    world = worlds[1]
    world.load("skip", **zero(2))
    before = world.hashes()
    for name in ("policy", "critic"):
        world.groups[name].call("apply_record", None, step=1, previous=trained.ORIGIN, log_hash="3" * 64)
        [status] = world.groups[name].status()
        assert (status["applied_step"], status["log_hash"], status["dirty"]) == (1, "3" * 64, False)
    assert world.hashes() == before


VARIANTS = {
    "micro batches of 4": {"policy": {"micro_batch_size": 4}, "critic": {"micro_batch_size": 4}},
    "micro batches of 8": {"policy": {"micro_batch_size": 8}, "critic": {"micro_batch_size": 8}},
    "activation checkpointing": {"model": {"activation_checkpointing": True}},
    "logits of 3 tokens at a time": {"model": {"chunk_tokens": 3}},
    "a mini-batch of all rows": {"policy": {"mini_batch_size": 8}, "critic": {"mini_batch_size": 8}},
}


@pytest.mark.parametrize(("variant", "stage"), [(name, 2) for name in VARIANTS] + [(list(VARIANTS)[3], 3)])
def test_how_a_batch_is_cut_changes_only_rounding(
    variant: str,
    stage: int,
    worlds: dict[int, World],
    records: list[Batch],
    golden: dict[tuple[int, int], dict[str, Any]],
) -> None:
    world = worlds[1]
    sections = copy.deepcopy(zero(stage))
    for section, keys in VARIANTS[variant].items():
        sections.setdefault(section, {}).update(keys)
    world.load(f"{variant}-{stage}".replace(" ", "-"), **sections)
    scores = world.score(records[0])
    for name in ("old_log_probs", "values"):
        np.testing.assert_allclose(scores[name], records[0][name], atol=TOLERANCE)
    for step, record in enumerate(records, start=1):
        same_metrics(world.apply(record, step), golden[stage, 1]["metrics"][step - 1])
    close(weights(world), golden[stage, 1]["weights"])


def test_mini_batches_are_optimizer_steps(worlds: dict[int, World], records: list[Batch], golden: Any) -> None:
    for ranks, world in worlds.items():
        sections = zero(2, mini_batch_size=4, micro_batch_size=2)
        world.load("mini", **sections, algorithm={"epochs": 3})
        metrics = world.apply(records[0], 1)
        assert world.groups["policy"].call("num_optimizer_steps") == [6] * ranks  # 8 rows / 4, three times
        assert metrics["policy/loss"] != golden[2, ranks]["metrics"][0]["policy/loss"]


def test_rows_of_padding_change_nothing(worlds: dict[int, World], records: list[Batch]) -> None:
    """7 rows on 2 ranks: one gets a row of no weight. The numbers are those of one rank, which needs none."""
    odd = [{name: column[:7] for name, column in record.items()} for record in records]
    found = []
    for world in worlds.values():
        world.load("odd", **zero(2))
        scores = world.score(odd[0])
        assert scores["old_log_probs"].shape == (7, trained.WIDTH)
        np.testing.assert_allclose(scores["old_log_probs"], records[0]["old_log_probs"][:7], atol=TOLERANCE)
        found.append(([world.apply(record, step) for step, record in enumerate(odd, start=1)], weights(world)))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        same_metrics(mine, theirs)
    close(found[0][1], found[1][1])


def with_nan(record: Batch, rows: list[int]) -> Batch:
    broken = {**record, "advantages": record["advantages"].copy(), "returns": record["returns"].copy()}
    broken["advantages"][rows] = broken["returns"][rows] = np.nan
    return broken


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", ["every loss", "the second loss of one rank", "one gradient of one rank"])
def test_what_is_not_finite_is_refused_on_every_rank_and_leaves_no_trace(
    fault: str,
    stage: int,
    worlds: dict[int, World],
    records: list[Batch],
    golden: dict[tuple[int, int], dict[str, Any]],
) -> None:
    world, hashes = worlds[2], golden[stage, 2]["hashes"]
    world.load(f"zero-{stage}", **zero(stage))
    world.restore()
    assert world.log is not None
    record = records[1]
    broken = {
        "every loss": with_nan(record, list(range(trained.ROWS))),
        # By then the first micro-batch of two rows has left its gradients.
        "the second loss of one rank": with_nan(record, [int(shard(record, 2, pad_rows=True)[1][1][2])]),
        "one gradient of one rank": record,
    }[fault]
    settings: dict[str, Any] = {"step": 2, "previous": world.log.log_hash(1), "log_hash": world.log.log_hash(2)}
    settings["kl_coefficient"] = 0.1
    for index, name in enumerate(("policy", "critic")):
        group = world.groups[name]
        if fault == "one gradient of one rank":
            group.call("poison_next_gradient", 1)
        for ref in group.call_sharded("apply_record", broken, **settings).refs:
            with pytest.raises(NonFiniteError):
                ray.get(ref)
        assert group.call("state_hash") == hashes[1][index]
        assert all(status["dirty"] for status in group.status())
        for ref in group.start("save", ["run_directory"], []):  # a dirty state is never saved
            with pytest.raises(AssertionError):
                ray.get(ref)
        for ref in group.call_sharded("apply_record", record, **settings).refs:
            with pytest.raises(AssertionError, match="dirty"):
                ray.get(ref)
    world.restore()
    assert world.apply(record, 2) == golden[stage, 2]["metrics"][1]
    assert world.hashes() == hashes[2]
