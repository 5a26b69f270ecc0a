"""Weights to two vLLM engines, against the parts it cannot do without: raw gloo of the same bytes, and vLLM's own repacking.

Prints JSON; every figure is the median of the rounds, in seconds, taken in turn in one run on warm memory.
``ratio``: ours / (raw_gloo + repacking). ``per_parameter``: one awaited call per parameter instead of buckets.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import LlamaConfig

from linckia.api.config import RunConfig
from linckia.api.load import load_config
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.member import Identity
from linckia_trainer.roles.rollout import RolloutMember
from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.gloo import ENGINE_RANK, TRAINER_RANK, GlooSender, gloo_pair

SIZES = {  # hidden, layers, vocabulary
    "large": (768, 12, 32000),  # 111 parameters, 418 MiB
    "small": (128, 12, 256),  # 111 parameters, 10 MiB
    "quick": (128, 2, 256),
}
ENGINES = 2
TIMEOUT = 120.0


class MeasuredMember(RolloutMember):
    """A rollout engine that can also do each part of a transfer alone."""

    def open_raw(self, host: str, port: int, key: str, num_bytes: int) -> None:
        self.raw_pair: Any = gloo_pair(host, port, key, ENGINE_RANK, TIMEOUT)
        self.raw_flat = torch.zeros(num_bytes, dtype=torch.uint8)

    def receive_raw(self) -> None:
        self.raw_pair.recv([self.raw_flat], TRAINER_RANK, 0).wait()

    def repack(self, layout: list[Parameter]) -> None:
        """What vLLM does with a whole set of weights that is there already."""
        self._transfer.staged = [(one.name, self.filled[one.name]) for one in layout]
        self._transfer.finish_weight_update()

    def keep(self, layout: list[Parameter]) -> None:
        self.filled = {one.name: torch.zeros(one.shape) for one in layout}

    def begin(self) -> None:
        self.one_by_one: list[tuple[str, Tensor]] = []

    def receive_one(self, parameter: Parameter) -> None:
        tensor = torch.empty(parameter.shape)
        self.raw_pair.recv([tensor], TRAINER_RANK, 0).wait()
        self.one_by_one.append((parameter.name, tensor))

    def finish(self) -> None:
        self._transfer.staged = self.one_by_one
        self._transfer.finish_weight_update()

    def checksum(self) -> float:
        """Of the final norm's weight, as the engine serves it."""
        return float(self._transfer.model.model.norm.weight.double().sum())

    @property
    def _transfer(self) -> Any:
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine


class Bench:
    """Two engines in Ray actors; this process is the sender."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = weights
        self.layout = [Parameter(name, tuple(one.shape), "float32") for name, one in weights.items()]
        self.num_bytes = sum(one.numel() * 4 for one in weights.values())
        member = ray.remote(concurrency_groups={"control": 1})(MeasuredMember)
        actors = [
            member.options(num_cpus=1).remote(Identity("bench", f"rollout-{i}", 1, 0, 1, 1), "cpu", 1, 600.0)
            for i in range(ENGINES)
        ]
        self.engines = ActorGroup("rollout", actors, 1, 1)
        self.engines.call("load", config)
        self._meet()

    def ours(self) -> None:
        calls = self.engines.start("receive_weights", 1, 1)
        lost = self.sender.send(self._gather)
        ray.get(list(calls))
        assert not lost, lost

    def raw_gloo(self) -> None:
        calls = self.engines.start("receive_raw")
        for work in [pair.send([self.flat], ENGINE_RANK, 0) for pair in self.raw_pairs]:
            work.wait()
        ray.get(list(calls))

    def repacking(self) -> None:
        self.engines.call("repack", self.layout)

    def per_parameter(self) -> None:
        self.engines.call("begin")
        for one in self.layout:
            calls = self.engines.start("receive_one", one)
            for work in [pair.send([self.weights[one.name]], ENGINE_RANK, 0) for pair in self.raw_pairs]:
                work.wait()
            ray.get(list(calls))
        self.engines.call("finish")

    def check(self) -> None:
        expected = float(self.weights["model.norm.weight"].double().sum())
        assert self.engines.call("checksum") == [expected] * ENGINES, "the engines do not serve what was sent"

    def _gather(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.weights[name]) for name in names)

    def _meet(self) -> None:
        self.sender = GlooSender(0, "127.0.0.1", self.layout, self.config.rollout.bucket_bytes, TIMEOUT)
        names = [str(number) for number in range(ENGINES)]
        invitations = self.sender.invite(names, 1)
        calls = [
            member.invoke.remote(1, 1, "open_transfer", invitations[name])
            for name, member in zip(names, self.engines.members, strict=True)
        ]
        assert not self.sender.connect()
        store = self.sender.store
        assert store is not None
        calls += [
            member.invoke.remote(1, 1, "open_raw", "127.0.0.1", store.port, f"raw/{name}", self.num_bytes)
            for name, member in zip(names, self.engines.members, strict=True)
        ]
        self.raw_pairs: list[Any] = [
            gloo_pair("127.0.0.1", store.port, f"raw/{name}", TRAINER_RANK, TIMEOUT, store) for name in names
        ]
        self.flat = torch.zeros(self.num_bytes, dtype=torch.uint8)
        ray.get(list(calls))
        self.engines.call("keep", self.layout)


def measure(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """All figures of one model size."""
    hidden, layers, vocabulary = SIZES[size]
    bench = Bench(*make(folder / size, hidden, layers, vocabulary))
    parts: dict[str, Callable[[], None]] = {
        name: getattr(bench, name) for name in ("raw_gloo", "repacking", "per_parameter", "ours")
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 1):  # the first one warms up
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - start)
            if name == "ours":
                bench.check()
        with torch.no_grad():
            bench.weights["model.norm.weight"].add_(number)
    bench.engines.kill()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "size": size,
        "parameters": len(bench.layout),
        "mib": round(bench.num_bytes / 2**20, 1),
        "engines": ENGINES,
        "bucket_mib": bench.config.rollout.bucket_bytes / 2**20,
        "rounds": rounds,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "all_seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "ratio": round(medians["ours"] / (medians["raw_gloo"] + medians["repacking"]), 3),
        "per_parameter_ratio": round(medians["per_parameter"] / medians["ours"], 2),
    }


def make(folder: Path, hidden: int, layers: int, vocabulary: int) -> tuple[RunConfig, dict[str, Tensor]]:
    """The config of a run with such a model, and the policy's weights."""
    from transformers import LlamaForCausalLM

    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    path = folder / "run.yaml"
    (folder / "none.jsonl").write_text('{"prompt": "none"}\n')
    (folder / "none.py").write_text("def none(prompts, answers, examples):\n    return [0.0 for _ in prompts]\n")
    settings = {
        "run": {"name": folder.name},
        "model": {"path": str(folder)},
        "data": {"train": {"file": str(folder / "none.jsonl")}, "max_prompt_tokens": 16},
        "reward": {"function": f"{folder / 'none.py'}:none"},
        "rollout": {
            "engines": ENGINES,
            "max_new_tokens": 8,
            "engine_args": {"load_format": "dummy", "skip_tokenizer_init": True},
        },
    }
    path.write_text(json.dumps(settings))  # JSON is YAML
    return load_config(path, []), dict(LlamaForCausalLM(config).named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small size and few rounds: does it still run?")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=ENGINES + 1, include_dashboard=False, logging_level="ERROR")
    sizes = ["quick"] if arguments.quick else ["large", "small"]
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(size, 2 if arguments.quick else arguments.rounds, Path(folder)) for size in sizes]
    print(json.dumps({"benchmark": "weight_sync", "cores": os.cpu_count(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
