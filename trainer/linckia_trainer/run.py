"""``Run``: everything the controller's stages work on, and what they tell about themselves."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia.api.names import API_VERSION
from linckia.decide.budget import restarts_left
from linckia.decide.limits import policy_to_json, watch_policy
from linckia_trainer.algorithms.rewards import Normalizer
from linckia_trainer.experience.prompts import Prompt, PromptSet, prompt_at
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.log.chain import Record, RunLog
from linckia_trainer.log.records import Carried
from linckia_trainer.log.store import Store
from linckia_trainer.metrics import names
from linckia_trainer.metrics.progress import RunProgress
from linckia_trainer.metrics.record import record_metrics
from linckia_trainer.metrics.recovery import recovery_metrics
from linckia_trainer.metrics.sinks import Metrics
from linckia_trainer.weights.sync import WeightSync

if TYPE_CHECKING:
    from linckia_trainer.healing import Healer

Batch = dict[str, NDArray[Any]]
SHOWN_RECOVERIES = 20


@dataclass(frozen=True)
class Heard:
    """What the members answered at ``time`` (time.monotonic): for each group (generation, one status per rank or None)."""

    time: float
    statuses: dict[str, tuple[int, list[dict[str, Any] | None]]]


@dataclass
class Run:
    """One attempt of a run while it is alive. Nothing here has to survive: the log and the states do."""

    config: RunConfig
    folder: Path
    store: Store
    log: RunLog
    attempt: int
    start: Carried
    tokenizer: Any
    pad_token: int
    prompts: PromptSet
    held_out: PromptSet | None
    policy: ActorGroup
    critic: ActorGroup | None
    reference: ActorGroup | None
    reward: ActorGroup
    engines: list[ActorGroup]
    weights: WeightSync
    metrics: Metrics
    progress: RunProgress
    scored_steps: set[int]
    hybrid: bool = False  # engines and trainer share their GPUs and take turns
    first_step: int = 1
    wanted_engines: int | None = None  # asked for while the run lives; None: as the config says
    leaving: list[ActorGroup] = field(default_factory=list)  # engines that get no more prompts
    stop_requested: threading.Event = field(default_factory=threading.Event)
    checkpoint_requested: threading.Event = field(default_factory=threading.Event)
    step: int = 0
    stage_name: str = "start"
    seconds: dict[str, float] = field(default_factory=dict)
    step_began: float = 0.0
    last_row: dict[str, float] = field(default_factory=dict)
    complete_states: dict[str, list[int]] = field(default_factory=dict)
    last_checkpoint: int = 0
    last_checkpoint_time: float = field(default_factory=time.monotonic)
    warnings: list[str] = field(default_factory=list)
    members: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    heard: "Heard | None" = None  # of the last look at the members
    tokens_generated: int = 0
    held_out_score: float | None = None
    _carried: tuple[str, Carried] | None = None
    healer: "Healer" = field(init=False)  # set once the groups stand

    @property
    def stateful(self) -> list[ActorGroup]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def groups(self) -> list[ActorGroup]:
        single = [self.policy, self.critic, self.reference, self.reward]
        return [group for group in single if group is not None] + self.engines

    def group(self, name: str) -> ActorGroup:
        """KeyError if the run has no such group."""
        return {group.name: group for group in self.groups}[name]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts.examples)

    def carried(self) -> Carried:
        """Cursor, KL coefficient and normaliser as the step after the log's head starts from them."""
        head = self.log.head()
        if not head:
            return self.start
        log_hash = self.log.log_hash(head)
        if self._carried is None or self._carried[0] != log_hash:
            self._carried = (log_hash, self.log.read(head).carried())
        return self._carried[1]

    def prompt(self, position: int) -> Prompt:
        return self.prompts.examples[self.prompt_index(position, self.prompts)]

    def prompt_index(self, position: int, prompts: PromptSet) -> int:
        """Where the prompt of a position stands in its set; held-out positions are the places themselves."""
        if prompts is not self.prompts:
            return position
        return prompt_at(position, self.num_prompts, self.config.run.seed, self.config.data.shuffle)

    @contextlib.contextmanager
    def stage(self, name: str, step: int | None = None) -> Iterator[None]:
        """Time a stage and show that it runs."""
        began = time.monotonic()
        if step is not None:
            self.step, self.step_began, self.seconds = step, began, {}
        self.stage_name = name
        self.progress.stage(self.step, name)
        yield
        self.seconds[name] = time.monotonic() - began

    def evaluation_due(self, step: int) -> bool:
        """Before step 1, every ``evaluation.every`` steps and after the last, unless it was done already."""
        every, last = self.config.evaluation.every, self.config.run.steps
        wanted = step % every == 0 or step == last
        return self.held_out is not None and wanted and step not in self.scored_steps

    def applied(self, record: Record, update_metrics: dict[str, float]) -> None:
        """The groups have applied a record, for the first time or again: its row is written before any state is saved,
        so that whoever restores a later state finds it."""
        header = record.header
        row = record_metrics(record.arrays, header.kl_coefficient, header.epoch, header.reward_part_names)
        self.last_row = row | update_metrics
        self.metrics.log(record.step, self.last_row)

    def finish_step(self, record: Record) -> None:
        """Write where the step's time went, beside what ``applied`` wrote of it."""
        times = {names.seconds(stage): self.seconds[stage] for stage in names.STAGES if stage in self.seconds}
        times[names.SECONDS_STEP] = time.monotonic() - self.step_began
        times |= self.healer.costs.row()
        times[names.TOKENS_PER_SECOND] = int(record.arrays["lengths"].sum()) / times[names.SECONDS_STEP]
        self.last_row |= times
        self.metrics.log(record.step, times)
        self.progress.step(record.step, self.last_row)

    def finish_evaluation(self, step: int, rewards: Batch, part_names: Sequence[str]) -> None:
        parts = {name: float(rewards["reward_parts"][:, i].mean()) for i, name in enumerate(part_names)}
        reward = float(rewards["rewards"].mean())
        score = parts[self.config.evaluation.score] if self.config.evaluation.score else reward
        row = {names.EVALUATION_PART + name: value for name, value in parts.items()}
        row |= {
            names.EVALUATION_SCORE: score,
            names.EVALUATION_REWARD: reward,
            names.EVALUATION_SAMPLES: float(len(rewards["rewards"])),
            names.SECONDS_EVALUATE: self.seconds["evaluate"],
        }
        self.scored_steps.add(step)
        self.held_out_score = score
        self.metrics.log(step, row)
        self.progress.evaluated(step, score, len(rewards["rewards"]))

    def count_tokens(self, amount: int) -> None:
        self.tokens_generated += amount

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            self.progress.message(f"warning: {text}")

    def view(self) -> dict[str, Any]:
        """What ``GET /v1/run`` answers."""
        heard = self.heard  # set from another thread: one look at it
        return {
            "api_version": API_VERSION,
            "run": self.config.run.name,
            "uri": self.config.run.dir,
            "attempt": self.attempt,
            "step": self.step,
            "steps": self.config.run.steps,
            "stage": self.stage_name,
            "stopping": self.stop_requested.is_set(),
            "log_head": self.log.head(),
            "last_checkpoint": self.last_checkpoint,
            "groups": {
                group.name: {
                    "generation": group.generation,
                    "members": self.members.get(group.name, []),
                    "standbys": len(self.healer.site.standbys.get(group.name, [])),
                    "returning": group.name in self.healer.jobs,
                    "restarts_left": restarts_left(self.healer.losses, group.name, self.step, self.config.recovery),
                }
                for group in self.groups
            },
            "heard": heard_json(heard, time.monotonic()) if heard is not None else None,
            "watch": policy_to_json(watch_policy(self.config)),
            "recoveries": [asdict(one) for one in self.healer.finished[-SHOWN_RECOVERIES:]],
            "recoveries_total": len(self.healer.finished),
            "recoveries_seconds": sum(one.seconds_total for one in self.healer.finished),
            "recovery_metrics": recovery_metrics(self.healer),
            "metrics": self.last_row,
            "held_out_score": self.held_out_score,
            "seconds_left": self.progress.time_left(),
            "warnings": self.warnings[-20:],
            "tokens_generated": self.tokens_generated,
        }


def heard_json(heard: Heard, now: float) -> dict[str, Any]:
    """What a watcher outside needs of the members' answers: null for a rank that did not answer in time."""
    wanted = ("generation", "stage", "progress", "pid", "node_id")
    return {
        "seconds_ago": max(0.0, now - heard.time),
        "groups": {
            name: {
                "generation": generation,
                "members": [
                    None if status is None else {key: status[key] for key in wanted if key in status}
                    for status in statuses
                ],
            }
            for name, (generation, statuses) in heard.statuses.items()
        },
    }


def fresh_start(config: RunConfig) -> Carried:
    """What step 1 starts from."""
    return Carried(0, config.algorithm.kl.coefficient, asdict(Normalizer(0, 0.0, 0.0)))
