import numpy as np
import pytest
import torch

from linckia.api.config import Optimizer, Trained
from linckia_trainer.groups.engine import CopyingCheckpointEngine, deepspeed_config, learning_rate, named_tensors
from linckia_trainer.groups.model_member import micro_batches


def rates(steps: int, total: int = 10, **keys: object) -> list[float]:
    settings = Optimizer.model_validate({"lr": 1.0, **keys})
    return [learning_rate(settings, step, total) for step in range(1, steps + 1)]


def test_constant_rate_after_linear_warm_up() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_decay_reaches_zero_behind_the_last_step() -> None:
    assert rates(4, total=4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(7, total=6, schedule="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])
    # decay_steps is where it ends, whatever the run's length; behind it the rate stays 0
    assert rates(4, total=100, schedule="linear", decay_steps=2) == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_cosine_decay() -> None:
    half = 0.5 * (1 + 0.5**0.5)
    assert rates(5, total=4, schedule="cosine") == pytest.approx([1.0, half, 0.5, 1 - half, 0.0])


def test_offload_moves_parameters_only_where_they_are_sharded() -> None:
    def zero(**keys: object) -> dict[str, object]:
        config: dict[str, object] = deepspeed_config(Trained.model_validate(keys), "cuda", torch.bfloat16)
        section = config["zero_optimization"]
        assert isinstance(section, dict)
        return section

    assert zero(zero_stage=3) == {"stage": 3}
    assert "offload_param" not in zero(zero_stage=2, offload=True)
    assert zero(zero_stage=3, offload=True)["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert zero(zero_stage=0, offload=True) == {"stage": 0}


def test_micro_batches_are_trimmed_to_their_own_longest_row() -> None:
    arrays = {
        "lengths": np.array([2, 3, 5], np.int32),
        "tokens": np.arange(18, dtype=np.int32).reshape(3, 6),
        "reward_parts": np.arange(12.0).reshape(3, 4),
    }
    (first, one), (second, two) = micro_batches(arrays, 2)
    assert (first, second) == (slice(0, 2), slice(2, 3))
    assert one["tokens"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert two["tokens"].tolist() == [[12, 13, 14, 15, 16]]
    assert one["reward_parts"].shape == (2, 4)  # no column of tokens


def test_tensors_are_named_by_their_path() -> None:
    tree = {"a": [torch.tensor(1), {"b": torch.tensor(2)}], "c": "text", "d": (torch.tensor(3),)}
    assert [(name, int(value)) for name, value in named_tensors("", tree)] == [("/a/0", 1), ("/a/1/b", 2), ("/d/0", 3)]


def test_a_copy_of_the_states_stays_as_it_is_and_lends_its_memory_to_the_next() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    states = {"module": {"w": weights, "t": weights.T}, "steps": [torch.tensor(1), (torch.tensor(2), "text")]}
    first = CopyingCheckpointEngine()
    first.save(states, "folder/state/model.pt")
    weights += 1
    assert first.files["model.pt"]["module"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    lent = {name: one.data_ptr() for name, one in named_tensors("", first.files)}

    second = CopyingCheckpointEngine(spare=first.files)
    states["steps"].append(torch.tensor(3))  # type: ignore[attr-defined]  # another shape of tree: copied afresh
    second.save(states, "folder/state/model.pt")
    assert [(name, one.tolist()) for name, one in named_tensors("", second.files)] == [
        ("/model.pt/module/w", [[1, 2, 3], [4, 5, 6]]),
        ("/model.pt/module/t", [[1, 4], [2, 5], [3, 6]]),
        ("/model.pt/steps/0", 1),
        ("/model.pt/steps/1/0", 2),
        ("/model.pt/steps/2", 3),
    ]
    assert all(one.is_contiguous() for _, one in named_tensors("", second.files))
    same = [name for name, one in named_tensors("", second.files) if lent.get(name) == one.data_ptr()]
    assert same == ["/model.pt/module/w", "/model.pt/module/t"]
