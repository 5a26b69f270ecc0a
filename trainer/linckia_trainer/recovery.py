"""The only recovery rule, carried out: the newest valid state, plus replay of the records it lacks.

The same few lines serve a first start, a restart after everything was killed, and a step that had to be skipped.
"""

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from linckia.api.errors import DamagedError, UserError
from linckia_trainer import scaling
from linckia_trainer.algorithms.step import prepare
from linckia_trainer.groups.engine_errors import NonFiniteError
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.group import ActorGroup, Call
from linckia_trainer.groups.replace import Parts
from linckia_trainer.healing import answered, healed
from linckia_trainer.log.chain import Record
from linckia_trainer.state.choose import Choice, newest_valid, refusals
from linckia_trainer.state.tiers import RUN_DIRECTORY, StateRef, Tier, list_states
from linckia_trainer.weights import hybrid

if TYPE_CHECKING:
    from linckia_trainer.run import Run


Columns = dict[str, NDArray[Any]]

# What an update reads of a record; the rest stays out of the object store.
UPDATE_COLUMNS = (
    "tokens", "lengths", "loss_mask", "old_log_probs", "reference_log_probs", "values", "advantages", "returns",
)  # fmt: skip


def bring_to_head(run: "Run") -> None:
    """Bring every stateful group to the head of the log; each by itself, none rolled back because of another."""
    run.log.refresh()
    healed(run, lambda: catch_up(run, run.stateful), *run.stateful)


def catch_up(run: "Run", groups: list[ActorGroup], parts: Parts | None = None) -> None:
    """The rule for these groups: restore, then replay. A head that turns out not to be finite is skipped for good.

    Raises GroupLostError if one of them is lost meanwhile.
    """
    parts = parts or Parts()
    whole = False
    while not whole:
        with parts.part("restore"):
            applied = {group.name: restore(run, group) for group in groups}
        with parts.part("replay"):
            for warning in run.log.verify(needed_after=min(applied.values())):
                run.warn(warning)
            whole = replay(run, applied)


def replay(run: "Run", applied: dict[str, int]) -> bool:
    """Apply the records that groups, by name with their applied_step, lack; False if the head had to be skipped."""
    for step in range(min(applied.values()) + 1, run.log.head() + 1):
        record = run.log.read(step)
        columns = update_columns(run, record)
        calls = [start_applying(record, columns, run.group(name)) for name, at in applied.items() if at < step]
        try:
            run.applied(record, joined([call.results()[0] for call in calls]))
        except NonFiniteError as error:
            if step < run.log.head():
                raise
            skip(run, step, error)
            return False
    return True


def skip(run: "Run", step: int, error: NonFiniteError) -> None:
    """The record of ``step``, the head, must not be trained on."""
    if not run.log.skipped(step):
        run.warn(f"step {step} is skipped: {error}")
        run.log.mark_skip(step, str(error))


def apply(run: "Run", record: Record) -> dict[str, float]:
    """Every stateful group folds the record into its state; returns their metrics. Raises NonFiniteError."""
    run.healer.settle(*run.stateful)
    columns = update_columns(run, record)
    calls = [(group, start_applying(record, columns, group)) for group in run.stateful]
    found = []
    for group, call in calls:
        again = partial(apply_again, run, record, columns, group)
        found.append(answered(run, group, call, again)[0])
    return joined(found)


def apply_again(run: "Run", record: Record, columns: Columns | None, group: ActorGroup) -> Call:
    """A group that was healed stands at the head, so it has the record: it says once more what came of it."""
    if run.log.skipped(record.step):
        raise NonFiniteError(f"step {record.step} was not finite when {group.name} replayed it")
    return start_applying(record, columns, group)


def update_columns(run: "Run", record: Record) -> Columns | None:
    """What an update reads of a record, advantages included: the same for every group. None for a skipped step."""
    if record.skipped:
        return None
    arrays = prepare(record.arrays, vars(record.header), run.config)
    return {name: column for name, column in arrays.items() if name in UPDATE_COLUMNS}


def start_applying(record: Record, columns: Columns | None, group: ActorGroup) -> Call:
    """Send a record to a stateful group; ``columns`` are its ``update_columns``."""
    settings: dict[str, Any] = {
        "step": record.step,
        "previous": record.previous,
        "log_hash": record.log_hash,
        "kl_coefficient": record.header.kl_coefficient,
    }
    if columns is None:
        return group.start("apply_record", None, **settings)
    return group.call_sharded("apply_record", columns, **settings)


def joined(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: value for one in metrics for name, value in one.items()}


def restore(run: "Run", group: ActorGroup) -> int:
    """Put a group into its newest valid state; returns its applied_step. A group that stands right is left alone."""
    standing = group.status()
    at = standing[0]["applied_step"]
    agree = {(one["applied_step"], one["log_hash"], one["dirty"]) for one in standing} == {
        (at, run.log.hash_at(at), False)
    }
    if agree and at == run.log.head():
        return int(at)
    refs = saved_states(run, group)
    for ref in refs:
        if ref.invalid is not None:
            run.warn(f"{group.name}: {ref.key} in {ref.tier} is left out: {ref.invalid}")
    while (choice := choose(run, group, refs)) is not None:
        if agree and choice.step <= at:
            return int(at)
        try:
            group.call("restore", choice)
        except DamagedError as error:  # the next newest state, in whatever tier, serves as well
            run.warn(f"{group.name}: {getattr(error, 'cause', error)}")
            refs = [replace(ref, invalid=str(error)) if ref in choice.refs else ref for ref in refs]
            continue
        return choice.step
    if agree:  # freshly built from the model folder, which is state 0
        return int(at)
    reasons = refusals(refs, len(group.members), run.log.head(), run.log.hash_at)
    raise UserError(
        "run.dir",
        run.config.run.dir,
        f"no valid state of {group.name}: {'; '.join(reasons) or 'none was saved'}",
        "look at `linckia checkpoints RUN`, and rewind to a step that has one",
    )


def choose(run: "Run", group: ActorGroup, refs: list[StateRef]) -> Choice | None:
    return newest_valid(refs, len(group.members), run.log.head(), run.log.hash_at)


def saved_states(run: "Run", group: ActorGroup) -> list[StateRef]:
    """Every state of a group, the nodes' memory first: each member tells of its own node's."""
    in_memory = [ref for member in group.call("saved_states") for ref in member]
    return in_memory + list_states([Tier(RUN_DIRECTORY, run.store)], group.name, run.config.run.name)


def sync_engines(run: "Run", engines: list[ActorGroup] | None = None) -> None:
    """Give engines (all that stand, or those named) the policy's weights; the policy stands at the head of the log.

    Where they share their GPUs the engines are asleep until now, and the trainer leaves when they have the weights. An
    engine that is lost on the way is replaced beside the work; it gets its weights when it is loaded.
    """
    if engines is None:
        scaling.let_go(run)
    trained = run.stateful if run.hybrid else [run.policy]
    while True:
        run.healer.settle(*trained)
        standing = run.healer.loaded(run.engines if engines is None else engines)
        began = time.monotonic()
        try:
            losses = give_weights(run, standing)
        except GroupLostError as loss:  # of the policy: whatever its engines said is because of it
            run.healer.report(loss)
            continue
        for engine_loss in losses:
            run.healer.report(engine_loss)
        names = {engine_loss.group for engine_loss in losses}
        run.healer.refitted([engine for engine in standing if engine.name not in names], time.monotonic() - began)
        return


def give_weights(run: "Run", engines: list[ActorGroup]) -> list[GroupLostError]:
    losses: list[GroupLostError] = []

    def sync() -> None:
        losses.extend(run.weights.sync(run.log.head(), run.policy, engines))

    if run.hybrid:
        hybrid.to_engines(run.stateful, engines, sync)
    else:
        sync()
    return losses


def refit(run: "Run") -> None:
    """While others generate: engines that came back loaded get the weights and join. Never waits for a group.

    Engines that share their GPUs with the trainer wait for the next sync instead.
    """
    if run.hybrid or run.healer.returning(run.policy):
        return
    stale = [engine for engine in run.healer.loaded(run.engines) if not run.weights.serves(engine, run.log.head())]
    if stale:
        sync_engines(run, stale)


def await_engine(run: "Run") -> None:
    """No engine is left: wait for one and give it the weights. Where it shares its GPUs, the whole order runs once."""
    run.healer.await_one(run.engines)
    if run.hybrid:
        take_devices_back(run)
    sync_engines(run)


def take_devices_back(run: "Run") -> None:
    """After generation: where engines and trainer share their GPUs, the engines sleep and the trainer comes back."""
    if run.hybrid:
        engines = run.healer.loaded(run.engines)
        healed(run, lambda: hybrid.to_training(run.stateful, engines), *run.stateful)
