"""The losses: hand-worked numbers, a second implementation with its own gradients, and what must change nothing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from unit import algorithms_reference as reference

from linckia_trainer.algorithms import kl, losses

SEEDS = range(10)
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def random_inputs(seed: int) -> dict[str, torch.Tensor]:
    """[rows, T] tensors; NaN outside the mask; the last row is a padding row. ``new`` strays beyond the clip."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(2, 6)), int(rng.integers(1, 12)))
    mask = rng.random(shape) < 0.6
    mask[-1] = False
    old = rng.uniform(-3, -0.5, shape)

    def masked(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.where(mask, values, np.nan), dtype=torch.float32)

    return {
        "new": masked(old + rng.normal(0, 0.4, shape)),
        "old": masked(old),
        "other": masked(rng.normal(0, 1, shape)),
        "mask": torch.tensor(mask.astype(np.uint8)),
    }


def policy(inputs: dict[str, torch.Tensor], denominator: float) -> losses.Loss:
    return losses.policy_loss(inputs["new"], inputs["old"], inputs["other"], inputs["mask"], 0.2, denominator)


def value(inputs: dict[str, torch.Tensor], denominator: float) -> losses.Loss:
    return losses.value_loss(inputs["new"], inputs["old"], inputs["other"], inputs["mask"], 0.2, denominator)


def penalty(inputs: dict[str, torch.Tensor], denominator: float) -> losses.Loss:
    return losses.kl_loss(inputs["new"], inputs["old"], inputs["mask"], "k3", denominator)


def entropy(inputs: dict[str, torch.Tensor], denominator: float) -> losses.Loss:
    return losses.entropy_loss(inputs["new"], inputs["mask"], denominator)


LOSSES = [policy, value, penalty, entropy]


def gradient(loss: Callable[..., losses.Loss], inputs: dict[str, torch.Tensor], denominator: float):
    """(loss, metrics, gradient by ``new``)."""
    new = inputs["new"].clone().requires_grad_()
    total, metrics = loss({**inputs, "new": new}, denominator)
    total.backward()
    return total.item(), {name: metric.item() for name, metric in metrics.items()}, new.grad


def test_policy_loss_by_hand():
    # ratio 1.5, A 2: min(3, 2.4); ratio 0.5, A -1: min(-0.5, -0.8); ratio 1.5, A -1: min(-1.5, -1.2);
    # the last token is masked. -(2.4 - 0.8 - 1.5) / 4
    ratios, mask = torch.tensor([[1.5, 0.5, 1.5, 2.0]]), torch.tensor([[1, 1, 1, 0]])
    loss, metrics = losses.policy_loss(
        ratios.log() - 1, torch.full((1, 4), -1.0), tensor([2, -1, -1, 100]), mask, clip=0.2, denominator=4
    )
    assert loss.item() == pytest.approx(-0.025, rel=1e-5)
    assert metrics["clip_fraction"].item() == 2
    # ratio - 1 - log ratio: 2 * 0.0945349 + 0.1931472
    assert metrics["approx_kl"].item() == pytest.approx(0.3822170, rel=1e-5)


def test_the_gradient_at_the_old_policy_is_the_policy_gradient():
    # ratio 1: both branches tie, and d loss / d log p = -A / denominator.
    inputs = {"new": tensor([-1, -2]), "old": tensor([-1, -2]), "other": tensor([3, -5]), "mask": tensor([1, 1])}
    _, metrics, grad = gradient(policy, inputs, 2)
    assert_allclose(grad, [[-1.5, 2.5]], **CLOSE)
    assert metrics == {"clip_fraction": 0, "approx_kl": 0}


def test_value_loss_by_hand():
    # value 1, old 0.5, so clipped to 0.7. Return 0: max(1, 0.49) = 1. Return 2: max(1, 1.69) = 1.69. Half the mean.
    arguments = tensor([1, 1]), tensor([0.5, 0.5]), tensor([0, 2]), tensor([1, 1])
    loss, metrics = losses.value_loss(*arguments, value_clip=0.2, denominator=2)
    assert loss.item() == pytest.approx((1 + 1.69) / 4)
    assert (metrics["value_clip_fraction"].item(), metrics["value_error"].item()) == (1, 2)
    loss, metrics = losses.value_loss(*arguments, value_clip=None, denominator=2)
    assert loss.item() == pytest.approx(0.5)
    assert metrics["value_clip_fraction"].item() == 0


def test_kl_and_entropy_by_hand():
    # Twice as likely as in the reference: k1 = log 2 (see test_algorithms.py for the others), the second token masked.
    mask, half = tensor([1, 0]), torch.log(tensor([0.5, 0.9]))
    expected = {"k1": 0.6931472, "k2": 0.2402265, "k3": 0.1931472}
    for estimator, number in expected.items():
        loss, metrics = losses.kl_loss(half, half - np.log(2), mask, estimator, denominator=2)
        assert loss.item() == pytest.approx(number / 2, rel=1e-5)
        assert metrics["kl"].item() == pytest.approx(number, rel=1e-5)
    loss, metrics = losses.entropy_loss(tensor([3, 5]), mask, denominator=2)
    assert (loss.item(), metrics["entropy"].item()) == (-1.5, 3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_pulls_towards_the_reference(estimator: kl.Estimator):
    # k2: the derivative is log p - log q; k3: 1 - q / p. Here log p - log q = log 2.
    new = torch.log(tensor([0.5])).requires_grad_()
    losses.kl_loss(new, torch.log(tensor([0.25])), tensor([1]), estimator, denominator=1)[0].backward()
    assert new.grad.item() == pytest.approx({"k2": 0.6931472, "k3": 0.5}[estimator], rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_against_the_second_implementation(seed: int):
    inputs = random_inputs(seed)
    new, old, advantages, mask = (inputs[name].tolist() for name in ("new", "old", "other", "mask"))
    total, grads, clipped, approx_kl = reference.policy_loss(new, old, advantages, mask, 0.2)
    loss, metrics, grad = gradient(policy, inputs, 7)
    assert loss == pytest.approx(total / 7, rel=1e-6, abs=1e-6)
    assert metrics == pytest.approx({"clip_fraction": clipped, "approx_kl": approx_kl}, rel=1e-5, abs=1e-6)
    assert_allclose(grad, np.array(grads) / 7, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_against_the_second_implementation(seed: int, clip: float | None):
    inputs = random_inputs(seed)
    new, old, returns, mask = (inputs[name].tolist() for name in ("new", "old", "other", "mask"))
    total, grads, clipped, squared = reference.value_loss(new, old, returns, mask, clip)

    def clipped_at(inputs: dict[str, torch.Tensor], denominator: float) -> losses.Loss:
        return losses.value_loss(inputs["new"], inputs["old"], inputs["other"], inputs["mask"], clip, denominator)

    loss, metrics, grad = gradient(clipped_at, inputs, 7)
    assert loss == pytest.approx(total / 7, rel=1e-6, abs=1e-6)
    assert metrics == pytest.approx({"value_clip_fraction": clipped, "value_error": squared}, rel=1e-5, abs=1e-6)
    assert_allclose(grad, np.array(grads) / 7, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_against_the_second_implementation(seed: int, estimator: kl.Estimator):
    inputs = random_inputs(seed)
    new, old, mask = (inputs[name].tolist() for name in ("new", "old", "mask"))
    tokens = [(i, t) for i, row in enumerate(mask) for t in reference.trained_columns(row)]
    expected = sum(reference.kl_estimate(estimator, new[i][t], old[i][t]) for i, t in tokens)
    loss, _ = losses.kl_loss(inputs["new"], inputs["old"], inputs["mask"], estimator, 7)
    assert loss.item() == pytest.approx(expected / 7, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_parts_of_a_mini_batch_add_up_to_it(seed: int, loss: Callable[..., losses.Loss]):
    inputs = random_inputs(seed)
    denominator = int(inputs["mask"].sum())
    whole, metrics, grad = gradient(loss, inputs, denominator)
    parts = [
        gradient(loss, {name: array[row : row + 1] for name, array in inputs.items()}, denominator)
        for row in range(len(inputs["mask"]))
    ]
    assert whole == pytest.approx(sum(part[0] for part in parts), rel=1e-5, abs=1e-6)
    for name, number in metrics.items():
        assert number == pytest.approx(sum(part[1][name] for part in parts), rel=1e-5, abs=1e-6)
    assert_allclose(grad, torch.cat([part[2] for part in parts]), **CLOSE)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_rows_alone_give_zero_and_no_nan(loss: Callable[..., losses.Loss]):
    padding = {name: torch.full((2, 3), torch.inf) for name in ("new", "old", "other")}
    for denominator in (0, 5):
        total, metrics, grad = gradient(loss, {**padding, "mask": torch.zeros(2, 3, dtype=torch.uint8)}, denominator)
        assert total == 0
        assert set(metrics.values()) == {0}
        assert not grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_bfloat16_are_summed_in_float32(loss: Callable[..., losses.Loss]):
    # 1000 bfloat16 terms: their sum in bfloat16 would stop growing at 256 times the term.
    ones = torch.ones(1, 1000)
    inputs = {"new": -ones.bfloat16(), "old": -2 * ones.bfloat16(), "other": ones.bfloat16(), "mask": ones}
    one = {name: array[:, :1].float() for name, array in inputs.items()}
    total, _ = loss(inputs, 1)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * loss(one, 1)[0].item(), rel=1e-5)
