"""Which way weights travel, who is told what, and models whose head is not tied although they say so."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from unit.fakes import Answered, config_of

from linckia.api.errors import UserError
from linckia_trainer.groups.engine_errors import EnginesLostError
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.roles.rollout import engine_arguments
from linckia_trainer.weights import ipc, sync
from linckia_trainer.weights.own_head import has_own_head
from linckia_trainer.weights.sync import WeightSync
from linckia_trainer.weights.transfer import transfer_backend


@pytest.mark.parametrize(
    ("device", "colocation", "transfer", "expected"),
    [
        ("cpu", "separate", "auto", "gloo"),
        ("cpu", "all", "auto", "gloo"),
        ("cuda", "separate", "auto", "nccl"),
        ("cuda", "all", "auto", "ipc"),
        ("cuda", "separate", "gloo", "gloo"),
        ("cuda", "separate", "cuda_ipc", "ipc"),
    ],
)
def test_backend(tmp_path: Path, device: str, colocation: str, transfer: str, expected: str) -> None:
    config = config_of(tmp_path, f"placement.colocation={colocation}", f"rollout.transfer={transfer}")
    assert transfer_backend(config, device) == expected
    assert engine_arguments(config, device, 64)["weight_transfer_config"] == {"backend": expected}


@pytest.mark.parametrize("transfer", ["nccl", "cuda_ipc"])
def test_ways_that_need_gpus_are_refused_without(tmp_path: Path, transfer: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.transfer"):
        transfer_backend(config_of(tmp_path, f"rollout.transfer={transfer}"), "cpu")


def test_a_tensor_parallel_engine_takes_rays_executor(tmp_path: Path) -> None:
    arguments = engine_arguments(config_of(tmp_path, "rollout.tensor_parallel_size=2"), "cuda", 64)
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["distributed_executor_backend"] == "ray"
    single = engine_arguments(config_of(tmp_path, "placement.colocation=all"), "cuda", 64)
    assert "distributed_executor_backend" not in single
    assert single["enable_sleep_mode"] is True


@pytest.mark.parametrize(
    ("says_tied", "own", "expected"),
    [(True, "other", True), (True, "same", False), (True, None, False), (False, "other", False)],
)
def test_own_head(tmp_path: Path, says_tied: bool, own: str | None, expected: bool) -> None:
    embedding = torch.arange(6.0).view(3, 2)
    tensors = {"model.embed_tokens.weight": embedding}
    if own:
        tensors["lm_head.weight"] = embedding + (own == "other")
    for number, (name, tensor) in enumerate(tensors.items()):  # one file each, as in a sharded folder
        save_file({name: tensor.clone()}, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": says_tied}))
    assert has_own_head(tmp_path) is expected


def test_ipc_handles_travel_as_plain_data() -> None:
    arguments = (
        torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        3, b"handle\x00\xff", 64, 512, False, b"counter", 2, b"event", True,
    )  # fmt: skip
    assert len(arguments) == len(inspect.signature(rebuild_cuda_tensor).parameters)
    update = {"names": ["a"], "shapes": [[4, 4]], "ipc_handles": {"GPU-1": arguments, "GPU-2": arguments}}
    assert ipc.decode(ipc.encode(update).encode()) == update
    with pytest.raises(AssertionError, match="argument 5"):
        ipc.encode({"ipc_handles": {"GPU-1": (*arguments[:5], torch.float32, *arguments[6:])}})


class Recorder:
    """Stands for a group; writes down what it is asked."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.generation, self.calls = name, 1, calls
        self.failures: dict[str, list[Exception]] = {}

    def start(self, method: str, *arguments: Any) -> Answered:
        self.calls.append((self.name, method, *arguments))
        return Answered(*self.failures.pop(method, []))

    def call(self, method: str, engines: list[str]) -> list[Any]:
        self.calls.append((self.name, method, engines))
        return [{engine: f"for {engine}" for engine in engines}]

    def ask_status(self) -> Answered:
        return Answered(*self.failures.pop("status", []))

    def tell(self, method: str, engine: str) -> None:
        self.calls.append((self.name, method, engine))


@pytest.fixture(autouse=True)
def last_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls on their way the last one asked is answered first."""
    monkeypatch.setattr(sync, "ray", SimpleNamespace(wait=lambda refs, num_returns: (refs[-1:], refs[:-1])))


def test_a_new_round_whenever_its_members_change(tmp_path: Path) -> None:
    calls: list[Any] = []
    policy, a, b = (Recorder(name, calls) for name in ("policy", "a", "b"))
    weights = WeightSync(config_of(tmp_path), first_weights_travel=False)

    def asked(step: int, *engines: Recorder) -> list[Any]:
        calls.clear()
        weights.sync(step, policy, engines)  # type: ignore[arg-type]
        return list(calls)

    assert asked(0, a, b) == [("a", "assume_weights", 0, 1), ("b", "assume_weights", 0, 1)]
    travel = [("policy", "send_weights"), ("a", "receive_weights", 1, 1), ("b", "receive_weights", 1, 1)]
    assert asked(1, a, b) == [
        ("policy", "open_transfer", ["a/1", "b/1"]),
        ("a", "open_transfer", "for a/1"),
        ("b", "open_transfer", "for b/1"),
        ("policy", "connect_engines"),
        *travel,
    ]
    assert asked(1, a, b) == []
    assert ("policy", "open_transfer", ["a/1", "b/1"]) not in asked(2, a, b)
    b.generation = 2
    assert asked(2, a, b)[0] == ("policy", "open_transfer", ["b/2"])
    assert asked(3, a, b)[0] == ("policy", "open_transfer", ["a/1", "b/2"])
    policy.generation = 2
    assert asked(3, a, b)[0] == ("policy", "open_transfer", ["a/1", "b/2"])


def test_an_engine_that_is_lost_does_not_keep_the_others_from_their_weights(tmp_path: Path) -> None:
    calls: list[Any] = []
    policy, a, b = (Recorder(name, calls) for name in ("policy", "a", "b"))
    weights = WeightSync(config_of(tmp_path), first_weights_travel=False)
    lost = GroupLostError("b", 1, "death", "ActorDiedError", "died")
    policy.failures = {"send_weights": [EnginesLostError("engine b/1: gone")]}
    b.failures = {"receive_weights": [lost]}
    assert weights.sync(1, policy, [a, b]) == [lost]  # type: ignore[arg-type, list-item]
    assert weights.serves(a, 1)  # type: ignore[arg-type]
    assert not weights.serves(b, 1)  # type: ignore[arg-type]


def test_an_engine_that_nobody_called_since_it_died_is_not_invited(tmp_path: Path) -> None:
    calls: list[Any] = []
    policy, a, b = (Recorder(name, calls) for name in ("policy", "a", "b"))
    weights = WeightSync(config_of(tmp_path), first_weights_travel=False)
    lost = GroupLostError("b", 1, "death", "ActorDiedError", "died")
    b.failures = {"status": [lost]}
    assert weights.sync(1, policy, [a, b]) == [lost]  # type: ignore[arg-type, list-item]
    assert calls[0] == ("policy", "open_transfer", ["a/1"])
    assert weights.serves(a, 1)  # type: ignore[arg-type]
    lost = GroupLostError("a", 2, "death", "ActorDiedError", "died")
    a.generation, a.failures = 2, {"status": [lost]}
    calls.clear()
    assert weights.sync(2, policy, [a]) == [lost]  # type: ignore[arg-type, list-item]
    assert ("policy", "send_weights") not in calls


def test_the_policy_is_told_of_an_engine_that_is_lost_before_they_meet(tmp_path: Path) -> None:
    calls: list[Any] = []
    policy, a, b = (Recorder(name, calls) for name in ("policy", "a", "b"))
    weights = WeightSync(config_of(tmp_path), first_weights_travel=False)
    lost = GroupLostError("b", 1, "death", "ActorDiedError", "died")
    b.failures = {"open_transfer": [lost]}
    policy.failures = {"connect_engines": [EnginesLostError("engine b/1: it was lost before it came")]}
    assert weights.sync(1, policy, [a, b]) == [lost]  # type: ignore[arg-type, list-item]
    assert [call for call in calls if call[1] == "abandon_engine"] == [("policy", "abandon_engine", "b/1")]
    assert weights.serves(a, 1)  # type: ignore[arg-type]
    assert not weights.serves(b, 1)  # type: ignore[arg-type]


def test_when_the_policy_is_lost_no_engine_counts_as_served(tmp_path: Path) -> None:
    policy, a = (Recorder(name, []) for name in ("policy", "a"))
    weights = WeightSync(config_of(tmp_path), first_weights_travel=False)
    policy.failures = {"send_weights": [GroupLostError("policy", 1, "death", "ActorDiedError", "died")]}
    with pytest.raises(GroupLostError):
        weights.sync(1, policy, [a])  # type: ignore[arg-type, list-item]
    assert not weights.serves(a, 1)  # type: ignore[arg-type]
