"""KL, rewards, GAE, GRPO: hand-worked numbers, then a second implementation on random records."""

import math
from typing import get_args

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import ValidationError
from unit import algorithms_reference as reference
from unit.algorithms_batches import random_batch, run_config

from linckia.api.algorithms import ALGORITHMS, Algorithm
from linckia.api.config import Algorithm as AlgorithmConfig
from linckia.api.errors import UserError
from linckia_trainer.algorithms import advantages_of, gae, grpo, kl, masks, ppo
from linckia_trainer.algorithms.rewards import Normalizer, clip_rewards, token_rewards

SEEDS = range(10)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_estimators_of_a_token_twice_as_likely_as_in_the_reference():
    # log r = -log 2: k1 = log 2; k2 = (log 2)^2 / 2; k3 = (1/2 - 1) + log 2
    log_prob, reference_log_prob = np.array([math.log(0.5)]), np.array([math.log(0.25)])
    assert_allclose(kl.estimate("k1", log_prob, reference_log_prob), [0.6931472], **CLOSE)
    assert_allclose(kl.estimate("k2", log_prob, reference_log_prob), [0.2402265], **CLOSE)
    assert_allclose(kl.estimate("k3", log_prob, reference_log_prob), [0.1931472], **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: kl.Estimator):
    # The expectation over the policy of three tokens, against sum p log(p / q).
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.4, 0.2])
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert (p * kl.estimate(estimator, np.log(p), np.log(q))).sum() == pytest.approx(expected, rel=1e-12)


def test_k3_keeps_its_digits_near_the_reference():
    # x = 1e-3: e^x - 1 - x = x^2/2 + x^3/6 = 5.001667e-7; exp(x) - 1 in float32 alone is wrong by up to 6e-8.
    near = kl.k3(np.zeros(1, np.float32), np.full(1, 1e-3, np.float32))
    assert_allclose(near, [5.001667e-7], rtol=1e-3)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (0.055, 0.101),  # error 0.1, K = 100 / 1000: 0.1 * 1.01
        (0.05, 0.1),
        (5.0, 0.102),  # error clipped to 0.2
        (-1.0, 0.098),  # and to -0.2
        (math.inf, 0.102),
        (math.nan, 0.1),
    ],
)
def test_adapted_coefficient(observed: float, expected: float):
    assert kl.adapt_coefficient(0.1, observed, target=0.05, horizon=1000, num_samples=100) == pytest.approx(expected)


def test_adapted_coefficient_stays_positive_when_a_batch_exceeds_the_horizon():
    assert kl.adapt_coefficient(0.1, 0.0, target=0.05, horizon=10, num_samples=1000) == pytest.approx(0.08)


@pytest.mark.parametrize("seed", SEEDS)
def test_adapted_coefficient_against_the_second_implementation(seed: int):
    rng = np.random.default_rng(seed)
    arguments = (rng.uniform(0.01, 1), rng.uniform(-0.1, 0.3), rng.uniform(0.01, 0.3), 5000, int(rng.integers(1, 5000)))
    assert kl.adapt_coefficient(*arguments) == pytest.approx(reference.adapt(*arguments), rel=1e-12)


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_normalizer_by_hand():
    first = Normalizer().update(np.array([1.0, 3.0]))
    assert first == Normalizer(count=2, mean=2.0, m2=2.0)
    second = first.update(np.array([5.0]))
    assert second == Normalizer(count=3, mean=3.0, m2=8.0)  # 4 + 0 + 4
    assert_allclose(second.apply(np.array([5.0])), [1.2247449], **CLOSE)  # 2 / sqrt(8 / 3)


def test_normalizer_of_nothing_and_of_equal_rewards():
    assert Normalizer().update(np.array([])) == Normalizer()
    assert_array_equal(Normalizer().apply(np.array([7.0])), [7.0])
    equal = np.full(3, 0.1, np.float32)
    assert_array_equal(Normalizer().update(equal).apply(equal), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_normalizer_over_steps_against_two_passes_over_everything(seed: int):
    rng = np.random.default_rng(seed)
    normalizer, earlier = Normalizer(), []
    for size in rng.integers(1, 9, size=6):
        rewards = rng.normal(50, 3, size).astype(np.float32)
        normalizer = normalizer.update(rewards)
        if len(earlier) + size > 1:
            assert_allclose(normalizer.apply(rewards), reference.normalize(earlier, rewards.tolist()), **CLOSE)
        earlier += rewards.tolist()
    assert normalizer.count == len(earlier)


def test_clipped_rewards():
    assert_array_equal(clip_rewards(np.array([-3.0, 0.5, 2.0]), 1.0), np.array([-1.0, 0.5, 1.0], np.float32))
    assert_array_equal(clip_rewards(np.array([-3.0, 2.0]), None), np.array([-3.0, 2.0], np.float32))


def one_row(mask: list[int], **arrays: list[float]) -> dict[str, np.ndarray]:
    named = {name: np.array([values], np.float32) for name, values in arrays.items()}
    return {"loss_mask": np.array([mask], np.uint8), "positions": np.array([0], np.int64), **named}


def test_token_rewards_by_hand():
    # A prompt token, three answer tokens (the second from a tool), padding. log p - log q: 0.5 and -0.25.
    batch = one_row([0, 1, 0, 1, 0], old_log_probs=[0, -1, 0, -2, 0], reference_log_probs=[0, -1.5, 0, -1.75, 0])
    assert_allclose(token_rewards(batch, np.array([1.0]), 0.2, "k1", "reward"), [[0, -0.1, 0, 1.05, 0]], **CLOSE)
    assert_array_equal(token_rewards(batch, np.array([1.0]), 0.2, "k1", "loss"), [[0, 0, 0, 1, 0]])


def test_token_rewards_need_no_reference_when_nothing_is_penalised():
    batch = one_row([0, 1, 1, 0], old_log_probs=[0, -1, -1, 0])  # the row's last token is not trained on
    assert_array_equal(token_rewards(batch, np.array([2.0]), 0.0, "k1", "reward"), [[0, 0, 2, 0]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", get_args(kl.Estimator))
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_token_rewards_against_the_second_implementation(seed: int, estimator: kl.Estimator, where: str):
    batch = random_batch(seed)
    expected = reference.token_rewards(
        batch["rewards"].tolist(),
        batch["old_log_probs"].tolist(),
        batch["reference_log_probs"].tolist(),
        batch["loss_mask"].tolist(),
        0.3,
        estimator,
        where == "reward",
    )
    actual = token_rewards(batch, batch["rewards"], 0.3, estimator, where)
    assert actual.dtype == np.float32
    assert_allclose(actual, expected, **CLOSE)


# --- GAE, PPO ---------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma 0.5, lam 0.5. deltas: 1 - 0.75 = 0.25; 0.5 * 0.75 - 0.25 = 0.125; 0.5 * 0.25 - 0.5 = -0.375
    # advantages, the last first: 0.25; 0.125 + 0.25 * 0.25 = 0.1875; -0.375 + 0.25 * 0.1875 = -0.328125
    # The same row again, with a prompt, a masked token (value 9, never read) between its tokens and padding behind.
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)
    values = np.array([[0.5, 0.25, 0.75, 0, 0, 0], [0, 0.5, 9, 0.25, 0.75, 9]], np.float32)
    rewards = np.array([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]], np.float32)
    advantages, returns = gae.advantages_and_returns(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_allclose(advantages, [[-0.328125, 0.1875, 0.25, 0, 0, 0], [0, -0.328125, 0, 0.1875, 0.25, 0]], **CLOSE)
    assert_allclose(returns, [[0.171875, 0.4375, 1, 0, 0, 0], [0, 0.171875, 0, 0.4375, 1, 0]], **CLOSE)


def test_gae_at_its_two_ends():
    # lam 0: one-step temporal differences. lam 1, gamma 1: reward to go less the value.
    mask, rewards = np.ones((1, 3), bool), np.array([[1.0, 2.0, 3.0]])
    values = np.array([[10.0, 20.0, 30.0]])
    assert_allclose(gae.advantages_and_returns(rewards, values, mask, 1.0, 0.0)[0], [[11, 12, -27]], **CLOSE)
    assert_allclose(gae.advantages_and_returns(rewards, values, mask, 1.0, 1.0)[0], [[-4, -15, -27]], **CLOSE)


def test_whitened_by_hand():
    mask = np.array([[0, 1], [1, 0]], bool)
    assert_allclose(gae.whiten(np.array([[9.0, 1.0], [3.0, 9.0]]), mask), [[0, -1], [1, 0]], **CLOSE)
    assert_array_equal(gae.whiten(np.ones((2, 2)), np.zeros((2, 2), bool)), np.zeros((2, 2)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam", "whiten"), [(1.0, 0.95, True), (0.9, 0.5, False), (1.0, 1.0, False)])
def test_ppo_against_the_second_implementation(seed: int, gamma: float, lam: float, whiten: bool):
    batch = random_batch(seed)
    mask = batch["loss_mask"].tolist()
    rewards = token_rewards(batch, batch["rewards"], 0.1, "k1", "reward")
    advantages, returns = reference.gae(rewards.tolist(), batch["values"].tolist(), mask, gamma, lam)
    # A single advantage, or equal ones, have no spread: whitening then only magnifies the last digit.
    if whiten and np.ptp([advantages[i][t] for i, row in enumerate(mask) for t in reference.trained_columns(row)]):
        advantages = reference.whiten(advantages, mask)
    config = AlgorithmConfig(gamma=gamma, lam=lam, normalize_advantages=whiten)
    actual = ppo.advantages(batch, rewards, config)
    assert actual["advantages"].dtype == actual["returns"].dtype == np.float32
    assert_allclose(actual["advantages"], advantages, **CLOSE)
    assert_allclose(actual["returns"], returns, **CLOSE)


# --- GRPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "divide", "expected"),
    [
        ([1, 3], True, [-0.7071068, 0.7071068]),  # mean 2, sample deviation sqrt(2)
        ([0, 0, 3], True, [-0.5773503, -0.5773503, 1.1547005]),  # mean 1, sample deviation sqrt(6 / 2)
        ([0, 0, 3], False, [-1, -1, 2]),
        ([0.1, 0.1, 0.1], True, [0, 0, 0]),
        ([5], True, [0]),
    ],
)
def test_group_relative_by_hand(rewards: list[float], divide: bool, expected: list[float]):
    # Another group around it changes nothing.
    around = np.array([100.0, *rewards, 300.0])
    positions = np.array([4, *[7] * len(rewards), 4])
    relative = grpo.group_relative(around, positions, divide)
    assert_allclose(relative[1:-1], expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("divide", [True, False])
def test_grpo_against_the_second_implementation(seed: int, divide: bool):
    batch = random_batch(seed)
    rewards = token_rewards(batch, batch["rewards"], 0.1, "k3", "reward")
    positions, mask = batch["positions"].tolist(), batch["loss_mask"].tolist()
    actual = grpo.advantages(batch, rewards, AlgorithmConfig(name="grpo", normalize_advantages=divide))
    assert list(actual) == ["advantages"]
    assert_allclose(actual["advantages"], reference.grpo(rewards.tolist(), positions, mask, divide), **CLOSE)


def test_a_row_without_trained_tokens_is_not_in_its_group():
    batch = {"loss_mask": np.array([[1], [1], [0]], np.uint8), "positions": np.array([3, 3, 3])}
    rewards = np.array([[1.0], [3.0], [0.0]], np.float32)
    config = AlgorithmConfig(name="grpo", normalize_advantages=False)
    assert_array_equal(grpo.advantages(batch, rewards, config)["advantages"], [[-1], [1], [0]])


# --- the room as a whole ----------------------------------------------------------------------------------------------


def test_sums_over_trained_tokens():
    mask = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]], bool)
    values = np.array([[8, 1, 2, 8], [8, 8, 8, 8], [4, 8, 8, 5]])
    assert_array_equal(masks.row_sums(values, mask), [3, 0, 9])
    rows, columns = masks.last_trained(mask)
    assert_array_equal(rows, [0, 2])
    assert_array_equal(columns, [2, 3])


def test_every_algorithm_is_there_and_the_config_knows_what_it_needs():
    for name, algorithm in ALGORITHMS.items():
        config = run_config({"name": name})
        assert config.has_critic == algorithm.needs_critic
        batch = random_batch(seed=1)
        rewards = np.where(batch["loss_mask"].astype(bool), 1.0, np.nan).astype(np.float32)
        found = advantages_of(name)(batch, rewards, config.algorithm)
        assert ("returns" in found) == algorithm.needs_critic


def test_a_line_makes_an_algorithm_that_a_config_may_name(monkeypatch):
    with pytest.raises(ValidationError, match="must be one of 'ppo', 'grpo'; the nearest is 'grpo'"):
        run_config({"name": "gpro"})
    monkeypatch.setitem(ALGORITHMS, "gpro", Algorithm("linckia_trainer.algorithms.ppo", needs_critic=True))
    assert run_config({"name": "gpro"}).has_critic
    monkeypatch.setitem(
        ALGORITHMS, "gpro", Algorithm("linckia_trainer.algorithms.grpo", False, min_samples_per_prompt=3)
    )
    with pytest.raises(UserError, match=r"data\.samples_per_prompt = 2: gpro compares"):
        run_config({"name": "gpro"})
