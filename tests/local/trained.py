"""Real DeepSpeed groups on recorded experience: groups of one and of two ranks that load one config after another."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from local import tiny
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia.api.load import load_config
from linckia.api.plan import plan
from linckia_trainer.groups import placement
from linckia_trainer.groups.group import ActorGroup, start_group
from linckia_trainer.groups.member import Identity
from linckia_trainer.groups.placement import Placed
from linckia_trainer.groups.replace import load_all
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.records import RecordHeader, encode
from linckia_trainer.log.store import Store
from linckia_trainer.roles.critic import CriticMember
from linckia_trainer.roles.policy import PolicyMember
from linckia_trainer.roles.reference import ReferenceMember
from linckia_trainer.state.choose import Choice, newest_valid
from linckia_trainer.state.tiers import RUN_DIRECTORY, StateRef, Tier, list_states

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not see the tests' folder
Batch = dict[str, NDArray[Any]]
ORIGIN = "0" * 64
ROWS, WIDTH, PROMPT = 8, 14, 9
EMPTY = {"count": 0, "mean": 0.0, "m2": 0.0}


class Hands:
    """What a test wants to see and break in a trained member."""

    engine: Any
    identity: Identity

    def num_optimizer_steps(self) -> int:
        return int(self.engine.global_steps)

    def poison_next_gradient(self, rank: int) -> None:
        """On ``rank``, make one gradient of the next backward pass NaN, although the loss is finite."""
        if self.identity.rank == rank:
            parameter = next(self.engine.module.parameters())
            hook = parameter.register_hook(lambda gradient: (hook.remove(), gradient * float("nan"))[1])


class Critic(Hands, CriticMember):
    pass


class Policy(Hands, PolicyMember):
    def weights(self) -> Batch:
        """Every parameter, whole, by name."""
        names = [name for name, _ in self._named_parameters()]
        return {name: value.cpu().numpy().copy() for name, value in self.gather(names)}


MEMBERS: dict[str, type] = {"policy": Policy, "critic": Critic, "reference": ReferenceMember}


@dataclass
class World:
    """Standing groups of one number of ranks, and what they have loaded."""

    ranks: int
    folder: Path
    groups: dict[str, ActorGroup]
    placed: Placed
    joined: bool = False
    config: RunConfig | None = None
    log: RunLog | None = None

    @property
    def store(self) -> Store:
        assert self.config is not None
        return Store(self.config.run.dir, {}, False)

    def load(self, name: str, **sections: dict[str, Any]) -> None:
        """Bring policy and critic to state 0 of a new run directory ``name``, with this config."""
        self.config = config_of(self.folder / f"{self.ranks}-{name}", self.ranks, **sections)
        stateful = [group for group in self.groups.values() if group.name != "reference"]
        if not self.joined:
            load_all(self.config, ORIGIN, list(self.groups.values()))
            self.joined = True
        else:
            refs = [ref for group in stateful for ref in group.start("load", self.config)]
            ray.get(refs + [ref for group in stateful for ref in group.start("begin", self.config, ORIGIN)])
        info = {"host": "here", "pid": 1, "start_time": 0, "config": self.config.model_dump(mode="json")}
        attempts.claim(self.store, info)
        self.log = RunLog(self.store, ORIGIN)

    def score(self, batch: Batch) -> Batch:
        inputs = {name: batch[name] for name in ("tokens", "lengths", "loss_mask")}
        calls = [self.groups["policy"].call_sharded("log_probs", inputs)]
        calls.append(self.groups["critic"].call_sharded("values", inputs))
        if "reference" in self.groups:
            calls.append(self.groups["reference"].call_sharded("log_probs", inputs, pad_rows=False))
        joined: Batch = {}
        for call in calls:
            joined |= call.rows_joined()
        return joined

    def apply(self, batch: Batch, step: int, groups: tuple[str, ...] = ("policy", "critic")) -> dict[str, float]:
        """Commit ``batch`` as the record of ``step`` unless it is there, and fold it into the groups."""
        assert self.log is not None
        if self.log.head() < step:
            header = RecordHeader(step, 0, 2 * (step - 1), 2 * step, 0.1, 0.1, EMPTY, EMPTY, ("r",))
            self.log.commit(step, encode(header, batch), attempt=1)
        settings: dict[str, Any] = {
            "step": step,
            "previous": self.log.log_hash(step - 1),
            "log_hash": self.log.log_hash(step),
            "kl_coefficient": 0.1,
        }
        calls = [self.groups[name].call_sharded("apply_record", batch, **settings) for name in groups]
        metrics: dict[str, float] = {}
        for call in calls:
            metrics |= call.results()[0]
        return metrics

    def save(self) -> None:
        for name in ("policy", "critic"):
            self.groups[name].call("save", ["node_memory", "run_directory"], [], True)

    def states(self, name: str, tier: str | None = None) -> list[StateRef]:
        assert self.config is not None
        in_memory = [ref for member in self.groups[name].call("saved_states") for ref in member]
        refs = in_memory + list_states([Tier(RUN_DIRECTORY, self.store)], name, self.config.run.name)
        return [ref for ref in refs if tier in (None, ref.tier)]

    def restore(self, tier: str | None = None) -> list[int]:
        """Restore every group's newest state; returns the steps."""
        return [self.restore_group(name, tier).step for name in ("policy", "critic")]

    def restore_group(self, name: str, tier: str | None = None) -> Choice:
        assert self.log is not None
        choice = newest_valid(self.states(name, tier), self.ranks, self.log.head(), self.log.hash_at)
        assert choice is not None
        self.groups[name].call("restore", choice)
        return choice

    def hashes(self) -> list[list[str]]:
        return [self.groups[name].call("state_hash") for name in ("policy", "critic")]

    def remove(self) -> None:
        for group in self.groups.values():
            group.kill()
        placement.release(self.placed)


def stand(folder: Path, ranks: int, names: tuple[str, ...], **sections: dict[str, Any]) -> World:
    """Start groups of ``ranks`` members; nothing is loaded yet."""
    config = config_of(folder / f"{ranks}-placed", ranks, **sections)
    ordered, placed = placement.place(plan(config, gpus=False), config.run.name, 60)
    groups = {
        name: start_group(MEMBERS[name], ordered.group(name), placed, config.run.name, 1, 1, "cpu", 900)
        for name in names
    }
    return World(ranks, folder, groups, placed)


def config_of(folder: Path, ranks: int, **sections: dict[str, Any]) -> RunConfig:
    """ROWS rows a step; ``sections`` win key by key. All configs share one model folder."""
    model = folder.parent / "model"
    if not model.exists():
        tiny.make_model(model)
    group = {"num_gpus_per_node": ranks, "micro_batch_size": 2, "mini_batch_size": None}
    merged: dict[str, dict[str, Any]] = {
        "run": {"name": f"trained-{ranks}", "dir": str(folder / "run")},
        "model": {"path": str(model)},
        "data": {"prompts_per_step": 2, "samples_per_prompt": ROWS // 2},
        "algorithm": {"epochs": 1, "entropy": 0.01, "kl": {"coefficient": 0.1, "where": "loss", "estimator": "k3"}},
        "policy": dict(group),
        "critic": dict(group),
        "reference": {"micro_batch_size": 2},
        "storage": {"node_memory_dir": str(folder / "node_memory")},
    }
    for section, values in sections.items():
        merged[section] = {**merged.get(section, {}), **values}
    return load_config(str(tiny.write_config(folder, f"trained-{ranks}", **merged)), [])


def experience(seed: int) -> Batch:
    """A record's arrays but for what the groups themselves say: answers of 2 to 5 tokens behind 9 of prompt."""
    random = np.random.default_rng(seed)
    lengths = random.integers(PROMPT + 2, WIDTH + 1, ROWS).astype(np.int32)
    lengths[0] = WIDTH
    at = np.arange(WIDTH)[None]
    mask = (at >= PROMPT) & (at < lengths[:, None])
    return {
        "tokens": random.integers(2, 18, (ROWS, WIDTH)).astype(np.int32),
        "lengths": lengths,
        "loss_mask": mask.astype(np.uint8),
        "advantages": random.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "returns": random.standard_normal((ROWS, WIDTH)).astype(np.float32),
    }


def recorded(world: World, seed: int) -> Batch:
    """Experience scored by ``world``, with a reference that is some way off, as it is after some steps."""
    batch = experience(seed)
    batch |= world.score(batch)
    noise = np.random.default_rng(seed + 1).normal(0, 0.3, (ROWS, WIDTH)).astype(np.float32)
    batch["reference_log_probs"] = (batch["old_log_probs"] + noise) * batch["loss_mask"]
    return batch
