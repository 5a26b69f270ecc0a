"""The two functions around a record: what they read, that they are pure, and what they must not depend on."""

import copy
import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from unit import algorithms_reference as reference
from unit.algorithms_batches import random_batch, run_config, widen

from linckia_trainer.algorithms import step
from linckia_trainer.algorithms.rewards import Normalizer

SEEDS = range(10)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
HEADER = {"kl_coefficient": 0.1, "normalizer": {"count": 4, "mean": 1.0, "m2": 5.0}}
CONFIGS = {
    "ppo": run_config({"name": "ppo"}, {"normalize": True, "clip": 2.0}),
    "ppo, kl in the loss": run_config({"name": "ppo", "kl": {"where": "loss", "estimator": "k3"}}),
    "grpo": run_config({"name": "grpo"}),
    "grpo, normalised": run_config({"name": "grpo", "normalize_advantages": False}, {"normalize": True}),
}


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def config(request: pytest.FixtureRequest):
    return CONFIGS[request.param]


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_adds_finite_advantages_and_changes_nothing(seed: int, config):
    batch, header = random_batch(seed), copy.deepcopy(HEADER)
    before = copy.deepcopy(batch)
    prepared = step.prepare(batch, header, config)
    added = {"advantages", "returns"} if config.has_critic else {"advantages"}
    assert set(prepared) == set(batch) | added
    for name in added:
        assert prepared[name].dtype == np.float32
        assert prepared[name].shape == batch["loss_mask"].shape
        assert np.isfinite(prepared[name]).all()
        assert not prepared[name][batch["loss_mask"] == 0].any()
    assert header == HEADER
    for name, array in before.items():
        assert_array_equal(batch[name], array)
        assert_array_equal(prepared[name], array)


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_gives_the_same_bits_at_any_padding_width(seed: int, config):
    batch = random_batch(seed)
    width = batch["loss_mask"].shape[1]
    narrow, wide = step.prepare(batch, HEADER, config), step.prepare(widen(batch, 300), HEADER, config)
    for name in ("advantages", "returns") if config.has_critic else ("advantages",):
        assert_array_equal(wide[name][:, :width], narrow[name])
        assert not wide[name][:, width:].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_of_permuted_rows_is_the_permuted_result(seed: int, config):
    batch = random_batch(seed)
    order = np.random.default_rng(seed).permutation(len(batch["rewards"]))
    straight = step.prepare(batch, HEADER, config)
    permuted = step.prepare({name: array[order] for name, array in batch.items()}, HEADER, config)
    for name in ("advantages", "returns") if config.has_critic else ("advantages",):
        assert_allclose(permuted[name], straight[name][order], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_as_a_whole_against_the_second_implementation(seed: int):
    # CONFIGS["ppo"]: clip to 2, normalise with four earlier rewards, k1 in the reward, gamma 1, lam 0.95, whiten.
    earlier = [-0.5, 0.5, 2.0, 2.0]
    normalizer = Normalizer().update(np.array(earlier))
    batch = random_batch(seed)
    mask = batch["loss_mask"].tolist()
    scores = reference.normalize(earlier, [min(2.0, max(-2.0, reward)) for reward in batch["rewards"].tolist()])
    old, model = batch["old_log_probs"].tolist(), batch["reference_log_probs"].tolist()
    rewards = reference.token_rewards(scores, old, model, mask, 0.1, "k1", True)
    advantages, returns = reference.gae(rewards, batch["values"].tolist(), mask, 1.0, 0.95)
    header = {"kl_coefficient": 0.1, "normalizer": dataclasses.asdict(normalizer)}
    prepared = step.prepare(batch, header, CONFIGS["ppo"])
    assert_allclose(prepared["returns"], returns, **CLOSE)
    assert_allclose(prepared["advantages"], reference.whiten(advantages, mask), rtol=1e-5, atol=3e-6)


def two_rows() -> dict[str, np.ndarray]:
    # log p - log q of the three trained tokens: 0.5, 0.1, 0.0, so 0.2 nats a token
    return {
        "loss_mask": np.array([[0, 1, 1], [0, 1, 0]], np.uint8),
        "old_log_probs": np.array([[0, -1.0, -2.0], [0, -1.5, 7]], np.float32),
        "reference_log_probs": np.array([[0, -1.5, -2.1], [0, -1.5, 0]], np.float32),
        "rewards": np.array([1.0, 5.0], np.float32),
        "positions": np.array([0, 0], np.int64),
    }


def test_after_step_by_hand():
    # Observed 0.2 against 0.1: error clipped to 0.2; 2 samples of 10: 0.05 * 1.04. Rewards clipped to 1, 3.
    config = run_config({"kl": {"target": 0.1, "horizon": 10}}, {"normalize": True, "clip": 3.0})
    assert step.observed_kl(two_rows()) == pytest.approx(0.2, rel=1e-6)
    coefficient, normalizer = step.after_step(two_rows(), 0.05, Normalizer(), config)
    assert coefficient == pytest.approx(0.052)
    assert normalizer == Normalizer(count=2, mean=2.0, m2=2.0)


def test_after_step_of_fixed_settings_changes_nothing_and_needs_no_reference():
    batch = two_rows()
    del batch["reference_log_probs"]
    assert step.after_step(batch, 0.05, Normalizer(), run_config({})) == (0.05, Normalizer())


def test_after_step_without_trained_tokens_keeps_the_coefficient():
    batch = two_rows() | {"loss_mask": np.zeros((2, 3), np.uint8)}
    assert step.after_step(batch, 0.05, Normalizer(), run_config({"kl": {"target": 0.1}}))[0] == 0.05


def test_a_step_is_normalised_by_the_state_that_the_record_keeps_as_after_it():
    # First step, rewards 1 and 5: mean 3, deviation 2, so shaped -1 and 1, not the raw rewards.
    config = run_config({}, {"normalize": True})
    after = step.after_step(two_rows(), 0.0, Normalizer(), config)[1]
    shaped = step.shape_rewards(two_rows()["rewards"], Normalizer(), config)
    assert_allclose(shaped, [-1.0, 1.0], **CLOSE)
    assert_array_equal(shaped, after.apply(two_rows()["rewards"]))
