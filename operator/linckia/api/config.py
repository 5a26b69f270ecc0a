"""The run config: one typed, nested model; unknown keys fail; every value is decided once.

A key either decides the run's result (the default) or is *free*: placement, engines, logging and recovery
keys may change between attempts of one run. The deciding keys are part of ``log_hash(0)``. The run's name is neither:
states, actors and node memory carry it, so it stays, and equal runs of two names are equal.
"""

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from linckia.api.algorithms import ALGORITHMS
from linckia.api.errors import UserError

Role = Literal["policy", "critic", "reference", "reward", "rollout"]
ROLES: tuple[Role, ...] = ("policy", "critic", "reference", "reward", "rollout")
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Colocation = Literal["separate", "policy_reference", "critic_reward", "all"]

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

_MEMORY_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_memory(text: str) -> int:
    """Bytes of a size such as ``16GB`` (16 x 10^9), ``16GiB`` or ``16Gi`` (16 x 2^30); ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    size = int(float(match[1]) * _MEMORY_UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ValueError("must be a size with a unit, such as 16GB or 16GiB")
    return size


def ports_of(value: object) -> range:
    """The ports that ``control.port`` allows: one, or a range such as ``8470-8489``, both ends included. ValueError for
    anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535:
        return range(value, value + 1)
    match = re.fullmatch(r"(\d{1,5}) ?- ?(\d{1,5})", value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError("must be a port, or a range of ports such as 8470-8489; the largest is 65535")
    return range(int(match[1]), int(match[2]) + 1)


def _checked_memory(text: str) -> str:
    parse_memory(text)
    return text


def _checked_code(text: str) -> str:
    file, _, function = text.rpartition(":")
    if not file or not function.isidentifier():
        raise ValueError("must be file.py:function")
    return text


def _checked_name(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text):
        raise ValueError(
            "must be 1 to 63 letters, digits, dots, dashes or underscores and begin with a letter or digit"
        )
    return text


def _checked_ports(value: object) -> object:
    ports_of(value)
    return value


def _off_not_false(value: object) -> object:
    return "off" if value is False else value  # unquoted, YAML reads the word off as false


def _checked_algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        near = difflib.get_close_matches(text, ALGORITHMS, n=1)
        names = ", ".join(repr(name) for name in ALGORITHMS)
        raise ValueError(f"must be one of {names}" + (f"; the nearest is {near[0]!r}" if near else ""))
    return text


Memory = Annotated[str, AfterValidator(_checked_memory)]
Ports = Annotated[int | str, BeforeValidator(_checked_ports)]
Code = Annotated[str, AfterValidator(_checked_code)]
Watcher = Annotated[Literal["embedded", "operator", "off"], BeforeValidator(_off_not_false)]
RunName = Annotated[str, AfterValidator(_checked_name)]
AlgorithmName = Annotated[str, AfterValidator(_checked_algorithm)]


def free(description: str, **kwargs: Any) -> Any:
    """A field that may change between attempts of one run without changing its result."""
    return Field(description=description, json_schema_extra={"free": True}, **kwargs)


def deciding(description: str, **kwargs: Any) -> Any:
    """A field that decides the run's result; changing it needs a new run or ``--fork``."""
    return Field(description=description, **kwargs)


def fixed(description: str, **kwargs: Any) -> Any:
    """A field that decides no result and yet stays what it is while a run goes on."""
    return Field(description=description, json_schema_extra={"fixed": True}, **kwargs)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Run(Section):
    """The training job itself."""

    name: RunName = fixed("letters, digits, dot, dash, underscore; default: file stem + '-seed' + seed", default="")
    seed: Natural = deciding("seeds every random choice of the run", default=0)
    dir: str = free("where the run's log and states last: a folder or any fsspec URI", default="runs/{name}")
    steps: Positive = free("PPO steps to train in all", default=100)
    determinism: Literal["strict", "relaxed"] = deciding(
        "strict asks torch for deterministic kernels on GPUs too", default="relaxed"
    )


class Model(Section):
    """The language model that the policy starts from; critic and reference start from it too."""

    path: str = deciding("a Hugging Face causal LM folder or hub name that vLLM serves")
    make: Code | None = deciding("file.py:function(path, seed) that writes the folder when it is missing", default=None)
    dtype: Literal["auto", "float32", "bfloat16"] = deciding("auto: bfloat16 on GPU, float32 on CPU", default="auto")
    activation_checkpointing: bool = deciding("recompute activations in the backward pass", default=False)
    chunk_tokens: Positive = deciding("tokens whose logits exist at one time in a log-probability pass", default=2048)


class ReasoningGym(Section):
    """A procedural ``reasoning_gym`` task: prompts and verifier in one."""

    task: str = deciding("the task's name, as reasoning_gym.create_dataset takes it")
    size: Positive = deciding("number of examples to make", default=1000)
    seed: Natural = deciding("the task's own seed", default=0)
    options: dict[str, Any] = deciding("further arguments of the task", default_factory=dict)


class Prompts(Section):
    """Where prompts come from: exactly one of a JSONL file and a reasoning_gym task."""

    file: str | None = deciding("JSONL: each line {prompt: text or chat messages, ...}", default=None)
    reasoning_gym: ReasoningGym | None = deciding("a reasoning_gym task", default=None)

    @model_validator(mode="after")
    def _one_source(self) -> "Prompts":
        if (self.file is None) == (self.reasoning_gym is None):
            raise ValueError("needs exactly one of file and reasoning_gym")
        return self


class Data(Section):
    train: Prompts = deciding("prompts to train on")
    held_out: Prompts | None = deciding("prompts to evaluate on; none: no evaluation", default=None)
    prompt_key: str = deciding("the JSONL key that holds the prompt", default="prompt")
    chat_template: bool = deciding("wrap plain text prompts as one user message", default=False)
    system_prompt: str | None = deciding("a system message before each chat prompt", default=None)
    max_prompt_tokens: Positive = deciding("longer prompts are an error, found before anything starts", default=512)
    shuffle: bool = deciding("a new seeded order each epoch", default=True)
    prompts_per_step: Positive = deciding("prompts in one step's batch", default=32)
    samples_per_prompt: Positive = deciding("answers sampled for each prompt", default=1)


class Resources(Section):
    """What one member takes from Ray."""

    gpus: Annotated[float, Field(ge=0)] | None = free(
        "per member, on GPU runs; none: 1, or an equal share of 1 when colocated", default=None
    )
    cpus: Annotated[float, Field(ge=0)] = free("CPUs that Ray reserves for one member", default=1)
    memory: Memory | None = free("memory that Ray reserves for one member, such as 16GB", default=None)
    custom: dict[str, Annotated[float, Field(gt=0)]] = free("custom Ray resources per member", default_factory=dict)
    threads: Positive = free("CPU threads of one member; equal bits need equal threads", default=1)
    strategy: Strategy | None = free("Ray placement strategy; none: placement.strategy", default=None)


class Inference(Section):
    """A group that only runs forward passes: reference or reward."""

    num_nodes: Positive = free("nodes the group needs; it has num_nodes x num_gpus_per_node members", default=1)
    num_gpus_per_node: Positive = free("members per node (ranks; CPU ranks where there is no GPU)", default=1)
    micro_batch_size: Positive = deciding("rows in one forward pass of a member", default=16)
    resources: Resources = Field(default_factory=Resources, description="what one member takes")


class Rollout(Section):
    """The vLLM engines."""

    engines: Positive = free("number of engines", default=1)
    tensor_parallel_size: Positive = free("devices of one engine", default=1)
    max_new_tokens: Positive = deciding("longest answer", default=64)
    temperature: Annotated[float, Field(gt=0)] = deciding("sampling temperature", default=1.0)
    top_p: Annotated[float, Field(gt=0, le=1)] = deciding(
        "sample among the likeliest tokens that make up this probability; 1: all", default=1.0
    )
    top_k: int = deciding("sample among so many likeliest tokens; -1: all", default=-1, ge=-1)
    stop: tuple[str, ...] = deciding("strings that end an answer; the answer keeps them", default=())
    max_num_seqs: Positive = free("sequences an engine works on at one time", default=256)
    gpu_memory_utilization: Fraction = free("share of a GPU's memory for weights and KV cache", default=0.8)
    kv_cache_bytes: Positive = free("KV cache on CPU, bytes", default=64 << 20)
    enforce_eager: bool = free("no CUDA graphs", default=True)
    prefix_caching: bool = free("reuse the KV cache of shared prompt starts", default=False)
    transfer: Literal["auto", "gloo", "nccl", "cuda_ipc"] = free(
        "how weights travel; auto: gloo on CPU, cuda_ipc when engines share the policy's GPUs, else nccl",
        default="auto",
    )
    bucket_bytes: Positive = free("bytes of weights packed into one transfer", default=16 << 20)
    engine_args: dict[str, Any] = free("further vLLM EngineArgs", default_factory=dict)
    resources: Resources = Field(default_factory=Resources, description="what one engine device takes")


class Reward(Inference):
    """Where rewards come from: a Python function, a model, or the task's own verifier."""

    function: Code | None = deciding("file.py:function(prompts, answers, examples)", default=None)
    model: str | None = deciding("a sequence-classification model folder; its first logit is the reward", default=None)
    verifier: bool = deciding("score with the reasoning_gym task of the data", default=False)
    weights: dict[str, float] = deciding("weight of each named part (default 1)", default_factory=dict)
    clip: Annotated[float, Field(gt=0)] | None = deciding("clip rewards to [-clip, clip]", default=None)
    normalize: bool = deciding(
        "divide by the running standard deviation after removing the running mean", default=False
    )
    timeout: Annotated[float, Field(gt=0)] = free("seconds one scoring call may take", default=600)

    @model_validator(mode="after")
    def _one_source(self) -> "Reward":
        if sum([self.function is not None, self.model is not None, self.verifier]) != 1:
            raise ValueError("needs exactly one of function, model and verifier")
        return self


class KL(Section):
    """The penalty that keeps the policy near the reference."""

    coefficient: Annotated[float, Field(ge=0)] = deciding("0 and fixed: no reference group is started", default=0.05)
    estimator: Literal["k1", "k2", "k3"] = deciding(
        "how KL is estimated from a sampled token, r = reference / policy probability: k1 -log r; k2 (log r)^2 / 2; "
        "k3 r - 1 - log r (Schulman, Approximating KL divergence, 2020)",
        default="k1",
    )
    where: Literal["reward", "loss"] = deciding("a part of the token reward, or of the policy loss", default="reward")
    target: Annotated[float, Field(gt=0)] | None = deciding(
        "adaptive: nats per token to steer the coefficient to; none: fixed", default=None
    )
    horizon: Positive = deciding("adaptive: samples over which the coefficient moves", default=10_000)

    @model_validator(mode="after")
    def _penalises(self) -> "KL":
        if self.where == "loss" and self.estimator == "k1" and self.coefficient > 0:
            raise UserError(
                "algorithm.kl.estimator", "k1", "in the loss its gradient is zero on average, so it penalises nothing",
                "set algorithm.kl.estimator to k3 (or k2), or algorithm.kl.where to reward",
            )  # fmt: skip
        if self.target is not None and self.coefficient == 0:
            raise UserError(
                "algorithm.kl.coefficient", 0, "an adaptive coefficient that starts at 0 stays there",
                "start it above 0, such as 0.05, or leave algorithm.kl.target out",
            )  # fmt: skip
        return self


class Algorithm(Section):
    name: AlgorithmName = deciding("ppo: GAE with a critic; grpo: group-relative, no critic", default="ppo")
    gamma: Fraction = deciding("discount of a reward for each token it comes later", default=1.0)
    lam: Fraction = deciding("lambda of GAE: 0 trusts the critic alone, 1 the rewards alone", default=0.95)
    clip: Annotated[float, Field(gt=0)] = deciding("clip range of the policy ratio", default=0.2)
    value_clip: Annotated[float, Field(gt=0)] | None = deciding("clip range of values; none: unclipped", default=0.2)
    entropy: Annotated[float, Field(ge=0)] = deciding("weight of the entropy bonus", default=0.0)
    epochs: Positive = deciding("passes over one record", default=1)
    normalize_advantages: bool = deciding(
        "ppo: whiten over the record's trained tokens; grpo: divide by the group's deviation", default=True
    )
    kl: KL = Field(default_factory=KL, description="KL penalty")


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = deciding("peak learning rate", default=1e-6)
    betas: tuple[Fraction, Fraction] = deciding("AdamW betas", default=(0.9, 0.95))
    eps: Annotated[float, Field(gt=0)] = deciding("AdamW epsilon", default=1e-8)
    weight_decay: Annotated[float, Field(ge=0)] = deciding("AdamW weight decay", default=0.0)
    schedule: Literal["constant", "linear", "cosine"] = deciding("after warm-up", default="constant")
    warmup_steps: Natural = deciding("steps of linear warm-up", default=0)
    decay_steps: Positive | None = deciding("steps until the schedule ends; default: run.steps", default=None)
    max_grad_norm: Annotated[float, Field(gt=0)] = deciding("global gradient norm is clipped to this", default=1.0)


class Trained(Section):
    """A stateful group trained by DeepSpeed: policy or critic."""

    num_nodes: Positive = deciding("nodes the group needs; it has num_nodes x num_gpus_per_node members", default=1)
    num_gpus_per_node: Positive = deciding("members per node (ranks; CPU ranks where there is no GPU)", default=1)
    zero_stage: Literal[0, 2, 3] = deciding("DeepSpeed ZeRO stage", default=2)
    offload: bool = deciding("keep the optimizer state in CPU memory (GPU runs, ZeRO 2 and 3)", default=False)
    mini_batch_size: Positive | None = deciding(
        "rows of one optimizer step, all ranks; none: the whole record", default=None
    )
    micro_batch_size: Positive = deciding("rows in one forward and backward pass of a member", default=16)
    optimizer: Optimizer = Field(default_factory=Optimizer, description="AdamW and its schedule")
    resources: Resources = Field(default_factory=Resources, description="what one member takes")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_gpus_per_node


class CriticOptimizer(Optimizer):
    lr: Annotated[float, Field(gt=0)] = deciding("peak learning rate", default=1e-5)


class Critic(Trained):
    """As the policy, with a learning rate that suits a value head that starts from nothing."""

    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer, description="AdamW and its schedule")


class Placement(Section):
    device: Literal["auto", "cpu", "gpu"] = free("auto: gpu if the cluster has GPUs", default="auto")
    colocation: Colocation = free(
        "which roles share devices; all: engines sleep while training runs", default="separate"
    )
    strategy: Strategy = free("Ray placement strategy of each placement group", default="PACK")
    timeout: Annotated[float, Field(gt=0)] = free("seconds to wait for the cluster to fit the run", default=600)


class Evaluation(Section):
    every: Positive = free("evaluate before step 1 and every so many steps, and after the last", default=20)
    score: str | None = free("the reward part to report; none: the reward", default=None)
    samples_per_prompt: Positive = free("answers per held-out prompt", default=1)
    temperature: Annotated[float, Field(gt=0)] = free("sampling temperature", default=1.0)


class Tier(Section):
    """A place where states are kept."""

    every: Positive = free("save every so many steps", default=1)
    minutes: Annotated[float, Field(gt=0)] | None = free("also save when so many minutes have passed", default=None)
    keep: Annotated[int, Field(ge=2)] = free("complete states to keep", default=2)


class RunDirectoryTier(Tier):
    every: Positive = free("save every so many steps", default=10)
    keep: Annotated[int, Field(ge=2)] = free("complete states to keep", default=3)


class Storage(Section):
    node_memory: Tier | None = free("states in node memory; none: off", default=Tier())
    run_directory: RunDirectoryTier = free("states in the run directory: checkpoints", default=RunDirectoryTier())
    node_memory_dir: str = free("where node memory is mounted", default="/dev/shm/linckia")
    log_keep: Positive | None = free("records to keep; none: all", default=None)
    spool_seconds: Annotated[float, Field(ge=0)] = free(
        "spool finished trajectories this often while generating", default=5
    )
    single_writer: bool = free(
        "accept a store without put-if-absent: you start one controller at a time", default=False
    )
    options: dict[str, Any] = free("arguments of the fsspec filesystem, such as endpoint_url", default_factory=dict)


class Control(Section):
    host: str = free("address the control API listens on", default="127.0.0.1")
    port: Ports = free("0: any free port; of a range the first that is free", default=0)


class Recovery(Section):
    """What counts as failed, and how often and how soon a failed group is started again."""

    orphan_timeout: Annotated[float, Field(gt=0)] = free("seconds after which members nobody calls exit", default=900)
    collective_timeout: Annotated[float, Field(gt=0)] = free(
        "seconds one torch.distributed collective may take", default=600
    )
    max_restarts_per_step: Natural = free(
        "restarts of one group within one step; one more failure of it stops the run", default=4
    )
    back_off_seconds: Annotated[float, Field(ge=0)] = free(
        "wait before a group's second restart within one step; doubles each time, up to 300; the first is at once",
        default=5,
    )
    standbys: Natural = free("processes per member that wait, imports done, to take its place", default=0)
    watcher: Watcher = free(
        "who finds what is dead, hung or slow while no call fails: the controller itself, the Kubernetes operator, nobody",
        default="embedded",
    )
    watch_seconds: Annotated[float, Field(gt=0)] = free("seconds from one look of the watcher to the next", default=5)
    hang_floor_seconds: Annotated[float, Field(gt=0)] = free(
        "least seconds without progress that are ever called a hang", default=120
    )
    first_time_factor: Annotated[float, Field(ge=1)] = free(
        "a stage that was not seen to end before may stand still this many times hang_floor_seconds", default=15
    )
    straggler_factor: Annotated[float, Field(gt=1)] = free(
        "a member this many times slower than its peers, step after step, is reported", default=2
    )
    replace_stragglers: bool = free("also restart the group of a reported straggler", default=False)

    @model_validator(mode="after")
    def _consistent(self) -> "Recovery":
        if self.hang_floor_seconds < 3 * self.watch_seconds:
            raise UserError(
                "recovery.hang_floor_seconds",
                self.hang_floor_seconds,
                f"the watcher looks every {self.watch_seconds:g} s (recovery.watch_seconds), so one late answer is a hang",
                f"set it to {3 * self.watch_seconds:g} or more, or recovery.watch_seconds lower",
            )
        if self.watch_seconds > self.orphan_timeout / 3:
            raise UserError(
                "recovery.watch_seconds",
                self.watch_seconds,
                f"members that nobody calls for {self.orphan_timeout:g} s (recovery.orphan_timeout) exit",
                f"set it to {self.orphan_timeout / 3:g} or less",
            )
        if self.replace_stragglers and self.watcher == "off":
            raise UserError(
                "recovery.replace_stragglers",
                True,
                "nobody looks for stragglers with recovery.watcher: off",
                "set recovery.watcher to embedded, or leave recovery.replace_stragglers out",
            )
        return self


class Metrics(Section):
    tensorboard: bool = free("write TensorBoard event files", default=True)
    wandb_project: str | None = free("Weights & Biases project; needs the wandb package", default=None)


class RunConfig(Section):
    """The whole run. Load with ``linckia.api.load.load_config``."""

    run: Run = Field(default_factory=Run, description="the training job")
    model: Model = Field(description="the language model")
    data: Data = Field(description="prompts")
    reward: Reward = Field(description="the reward group and where rewards come from")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="how records become updates")
    policy: Trained = Field(default_factory=Trained, description="the policy group")
    critic: Critic = Field(default_factory=Critic, description="the critic group")
    reference: Inference = Field(default_factory=Inference, description="the reference group")
    rollout: Rollout = Field(default_factory=Rollout, description="the engines")
    placement: Placement = Field(default_factory=Placement, description="where groups go")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="held-out evaluation")
    storage: Storage = Field(default_factory=Storage, description="log, states, retention")
    control: Control = Field(default_factory=Control, description="the control API")
    recovery: Recovery = Field(default_factory=Recovery, description="time limits and budgets")
    metrics: Metrics = Field(default_factory=Metrics, description="where metrics go")

    @property
    def has_critic(self) -> bool:
        return ALGORITHMS[self.algorithm.name].needs_critic

    @property
    def has_reference(self) -> bool:
        return self.algorithm.kl.coefficient > 0 or self.algorithm.kl.target is not None

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step * self.data.samples_per_prompt

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        for name in ("policy", "critic") if self.has_critic else ("policy",):
            _check_batches(name, getattr(self, name), self.rows_per_step)
        least = ALGORITHMS[self.algorithm.name].min_samples_per_prompt
        if self.data.samples_per_prompt < least:
            raise UserError(
                "data.samples_per_prompt",
                self.data.samples_per_prompt,
                f"{self.algorithm.name} compares the samples of one prompt with each other",
                f"set it to {least} or more (8 is common)",
            )
        if self.reward.verifier and self.data.train.reasoning_gym is None:
            raise UserError(
                "reward.verifier",
                True,
                "data.train is no reasoning_gym task, so there is no verifier",
                "set reward.function or reward.model, or data.train.reasoning_gym",
            )
        return self


def _check_batches(name: str, group: Trained, rows: int) -> None:
    mini = group.mini_batch_size or rows
    if rows % mini:
        raise UserError(
            f"{name}.mini_batch_size",
            mini,
            f"does not divide the {rows} rows of a step (data.prompts_per_step x data.samples_per_prompt)",
            f"choose a divisor of {rows}",
        )
    if mini % (group.world_size * group.micro_batch_size):
        raise UserError(
            f"{name}.micro_batch_size",
            group.micro_batch_size,
            f"{group.world_size} ranks x {group.micro_batch_size} rows does not divide the mini-batch of {mini} rows",
            f"choose a micro_batch_size that divides {mini} / {group.world_size}",
        )
