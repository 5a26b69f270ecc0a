"""The main loop: the whole of PPO on Ray, each stage of a step named in order.

A step's experience is committed to the log before anything is trained on it; policy and critic are folds over that
log. So this loop holds no state of its own: whatever it was doing when it died, the next attempt reads the log, brings
the groups to its head and goes on.
"""

from dataclasses import asdict

from linckia_trainer import recovery
from linckia_trainer.algorithms.rewards import Normalizer
from linckia_trainer.algorithms.step import after_step
from linckia_trainer.experience.batching import assemble
from linckia_trainer.experience.generation import evaluation_requests, generate, sample
from linckia_trainer.experience.prompts import step_positions
from linckia_trainer.experience.scoring import score_rewards
from linckia_trainer.experience.trajectory import Trajectory
from linckia_trainer.groups.engine_errors import NonFiniteError
from linckia_trainer.healing import Asked
from linckia_trainer.log import spool
from linckia_trainer.log.chain import Record
from linckia_trainer.log.records import RecordHeader, encode
from linckia_trainer.run import Batch, Run
from linckia_trainer.saving import finish_saving, save, save_beginning


def train(run: Run) -> None:
    """Bring every group to the head of the log, then do the steps that are left."""
    with run.stage("recover"):
        recovery.bring_to_head(run)
        recovery.sync_engines(run)
        save_beginning(run)
    if run.evaluation_due(run.log.head()):
        evaluate(run, run.log.head())
    for step in range(run.log.head() + 1, run.config.run.steps + 1):
        if run.stop_requested.is_set():
            break
        with run.stage("generate", step):
            trajectories = generate(run, step)
            recovery.take_devices_back(run)
        with run.stage("score"):
            batch, part_names = score(run, trajectories)
        with run.stage("record"):
            record = commit(run, step, batch, part_names, trajectories)
        with run.stage("update"):
            update(run, record)
        with run.stage("sync"):
            recovery.sync_engines(run)
        with run.stage("save"):
            save(run, step)
        if run.evaluation_due(step):
            evaluate(run, step)
        run.finish_step(record)
    with run.stage("save"):
        finish_saving(run)


def score(run: Run, trajectories: list[Trajectory]) -> tuple[Batch, tuple[str, ...]]:
    """The experience of a step: old and reference log-probabilities, values and rewards, all asked for at once."""
    batch = assemble(trajectories, run.pad_token)
    inputs = {name: batch[name] for name in ("tokens", "lengths", "loss_mask")}
    parts = [Asked(run, run.policy, "log_probs", inputs)]
    if run.reference is not None:
        parts.append(Asked(run, run.reference, "log_probs", inputs, pad_rows=False))
    if run.critic is not None:
        parts.append(Asked(run, run.critic, "values", inputs))
    rewards, part_names = score_rewards(run, batch, run.prompts)
    for part in parts:
        batch |= part.rows_joined()
    return batch | rewards, part_names


def commit(run: Run, step: int, batch: Batch, part_names: tuple[str, ...], trajectories: list[Trajectory]) -> Record:
    """Write the step's record. From here on the step is decided; if a record is there already, that one is taken."""
    before = run.carried()
    _, cursor, epoch = step_positions(before.cursor, run.num_prompts, run.config.data.prompts_per_step)
    kl_coefficient, normalizer = after_step(batch, before.kl_coefficient, Normalizer(**before.normalizer), run.config)
    header = RecordHeader(
        step, epoch, before.cursor, cursor, before.kl_coefficient, kl_coefficient, before.normalizer,
        asdict(normalizer), part_names,
    )  # fmt: skip
    generations = sorted({trajectory.policy_generation for trajectory in trajectories})
    record = run.log.commit(step, encode(header, batch), run.attempt, {"policy_generations": generations})
    spool.clear(run.store, step)
    return record


def update(run: Run, record: Record) -> None:
    """Every stateful group applies the record. A step that is not finite is skipped for good and undone by the one rule."""
    try:
        run.applied(record, recovery.apply(run, record))
    except NonFiniteError as error:
        recovery.skip(run, record.step, error)
        recovery.bring_to_head(run)


def evaluate(run: Run, step: int) -> None:
    """Answers to the held-out prompts, scored by the reward group; they are never trained on."""
    assert run.held_out is not None
    with run.stage("evaluate"):
        trajectories = sample(run, evaluation_requests(run))
        batch = assemble(trajectories, run.pad_token)
        rewards, part_names = score_rewards(run, batch, run.held_out)
    run.finish_evaluation(step, rewards, part_names)
