"""Every metric by name, with unit and meaning. Members, controller, sinks and pages take them from here."""

from collections.abc import Iterable
from dataclasses import dataclass

STAGES = ("generate", "score", "record", "update", "sync", "save")


@dataclass(frozen=True)
class Metric:
    """A number that a row may hold. A name that ends in ``*`` stands for a family, such as ``reward/part/*``."""

    name: str
    unit: str
    description: str


REWARD = "reward/mean"
REWARD_PART = "reward/part/"
EVALUATION_SCORE = "evaluation/score"
EVALUATION_REWARD = "evaluation/reward"
EVALUATION_SAMPLES = "evaluation/samples"
EVALUATION_PART = "evaluation/part/"
KL = "kl/reference"
KL_COEFFICIENT = "kl/coefficient"
LOG_PROB_DIFFERENCE = "rollout/log_prob_difference"
LOG_PROB_DIFFERENCE_MAX = "rollout/log_prob_difference_max"
ANSWER_TOKENS = "rollout/answer_tokens"
PROMPT_TOKENS = "rollout/prompt_tokens"
FINISHED = "rollout/finished"
ENTROPY = "policy/entropy"
ROWS = "step/rows"
TOKENS = "step/tokens"
TOKENS_PER_SECOND = "step/tokens_per_second"
EPOCH = "step/epoch"
SKIPPED = "step/skipped"
SECONDS_STEP = "seconds/step"
SECONDS_EVALUATE = "seconds/evaluate"
SECONDS_STOOD_STILL = "seconds/stood_still"
SECONDS_REPLAYED = "seconds/replayed"
GENERATED_AGAIN = "recovery/generated_again"


def seconds(stage: str) -> str:
    """The metric of a stage's wall time."""
    return f"seconds/{stage}"


_AGAIN = "answers that a lost engine had not finished, so another one gave them"
_ALL = (
    Metric(REWARD, "reward", "mean reward of the step's answers, before clipping and normalisation"),
    Metric("reward/std", "reward", "standard deviation over the step's answers"),
    Metric("reward/min", "reward", "lowest of the step's answers"),
    Metric("reward/max", "reward", "highest of the step's answers"),
    Metric(REWARD_PART + "*", "reward", "mean of one named part of the reward, unweighted"),
    Metric(EVALUATION_SCORE, "score", "mean of evaluation.score over held-out answers"),
    Metric(EVALUATION_REWARD, "reward", "mean reward of held-out answers"),
    Metric(EVALUATION_PART + "*", "reward", "mean of one named part over held-out answers"),
    Metric(EVALUATION_SAMPLES, "answers", "held-out answers scored"),
    Metric(KL, "nats/token", "old policy against reference over trained tokens, k1 estimate"),
    Metric(KL_COEFFICIENT, "", "weight of the KL penalty in this step"),
    Metric(LOG_PROB_DIFFERENCE, "nats/token", "mean |engine - trainer| log-probability of sampled tokens"),
    Metric(LOG_PROB_DIFFERENCE_MAX, "nats/token", "largest |engine - trainer| log-probability of a sampled token"),
    Metric(ANSWER_TOKENS, "tokens", "mean answer length"),
    Metric(PROMPT_TOKENS, "tokens", "mean prompt length"),
    Metric(FINISHED, "share", "answers that ended by themselves, not at max_new_tokens"),
    Metric("policy/loss", "", "clipped surrogate, mean over trained tokens"),
    Metric("policy/clip_fraction", "share", "trained tokens whose policy ratio was clipped"),
    Metric("policy/approx_kl", "nats/token", "old against new policy, k3 estimate"),
    Metric("policy/kl", "nats/token", "KL penalty in the policy loss"),
    Metric(ENTROPY, "nats/token", "entropy of the policy at trained tokens"),
    Metric("policy/grad_norm", "", "global gradient norm before clipping, mean over optimizer steps"),
    Metric("policy/lr", "", "learning rate"),
    Metric("critic/loss", "", "value loss, mean over trained tokens"),
    Metric("critic/value_clip_fraction", "share", "trained tokens whose clipped value error was the larger"),
    Metric("critic/value_error", "reward^2", "unclipped value error, mean over trained tokens"),
    Metric("critic/grad_norm", "", "global gradient norm before clipping, mean over optimizer steps"),
    Metric("critic/lr", "", "learning rate"),
    Metric(ROWS, "answers", "rows of the step's record"),
    Metric(TOKENS, "tokens", "prompt and answer tokens of the step's record"),
    Metric(TOKENS_PER_SECOND, "tokens/s", "tokens of the record by the seconds of the step"),
    Metric(EPOCH, "epochs", "pass over the prompts"),
    Metric(SKIPPED, "", "1: the step is marked not to be trained on"),
    *(Metric(seconds(stage), "s", f"wall time of the {stage} stage") for stage in STAGES),
    Metric(SECONDS_STEP, "s", "wall time of the whole step"),
    Metric(SECONDS_EVALUATE, "s", "wall time of the held-out evaluation"),
    Metric(SECONDS_STOOD_STILL, "s", "wall time of the step that the loop waited for lost groups, replay included"),
    Metric(SECONDS_REPLAYED, "s", "wall time of the step that a group which came back applied records again"),
    Metric(GENERATED_AGAIN, "answers", _AGAIN),
)


@dataclass(frozen=True)
class Labelled:
    """A number per combination of labels, for Prometheus alone. ``counter``: it only grows within an attempt."""

    name: str
    unit: str
    description: str
    labels: tuple[str, ...]
    counter: bool = True


RECOVERIES = Labelled(
    "recoveries", "groups", "lost groups by how it ended: healed or given up", ("role", "cause", "result")
)
RECOVERY_SECONDS = Labelled("recovery_seconds", "s", "time of recoveries by part of the path", ("role", "part"))
TRAJECTORIES_AGAIN = Labelled("trajectories_generated_again", "answers", _AGAIN, ())
EFFECTIVE_TIME = Labelled(
    "effective_training_time_ratio",
    "share",
    "share of the attempt's time that the loop did not wait for lost groups; replay=useful counts replayed records as "
    "training time (as RobustRL does), replay=lost does not",
    ("replay",),
    counter=False,
)
LABELLED = (RECOVERIES, RECOVERY_SECONDS, TRAJECTORIES_AGAIN, EFFECTIVE_TIME)
METRICS = {metric.name: metric for metric in _ALL}


def find(name: str) -> Metric | None:
    """The metric that a name belongs to; None for a name that is not in this module."""
    if (exact := METRICS.get(name)) is not None:
        return exact
    families = (metric for metric in _ALL if metric.name.endswith("*"))
    return next((family for family in families if name.startswith(family.name[:-1])), None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of the names that this module does not hold."""
    return [name for name in names if find(name) is None]


def prometheus_name(name: str) -> str:
    """A metric's name as Prometheus takes it, such as ``linckia_reward_mean``."""
    return "linckia_" + "".join(letter if letter.isalnum() else "_" for letter in name)
