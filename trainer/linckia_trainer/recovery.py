"""The only recovery rule, carried out: the newest valid state, plus replay of the records it lacks.

The same few lines serve a first start, a restart after everything was killed, and a step that had to be skipped.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from linckia.api.errors import DamagedError, UserError
from linckia_trainer.algorithms.step import prepare
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.log.chain import Record
from linckia_trainer.state.choose import Choice, newest_valid, refusals
from linckia_trainer.state.tiers import RUN_DIRECTORY, StateRef, Tier, list_states
from linckia_trainer.weights import hybrid

if TYPE_CHECKING:
    from linckia_trainer.run import Run


# What an update reads of a record; the rest stays out of the object store.
UPDATE_COLUMNS = (
    "tokens", "lengths", "loss_mask", "old_log_probs", "reference_log_probs", "values", "advantages", "returns",
)  # fmt: skip


def bring_to_head(run: "Run") -> None:
    """Bring every stateful group to the head of the log; each by itself, none rolled back because of another."""
    run.log.refresh()
    applied = {group.name: restore(run, group) for group in run.stateful}
    for warning in run.log.verify(needed_after=min(applied.values())):
        run.warn(warning)
    for step in range(min(applied.values()) + 1, run.log.head() + 1):
        lacking = [name for name, at in applied.items() if at < step]
        record = run.log.read(step)
        metrics = apply(run, record, lacking)
        run.applied(record, metrics)


def apply(run: "Run", record: Record, groups: list[str] | None = None) -> dict[str, float]:
    """Send a record to the stateful groups (all, or those named), which fold it into their states."""
    settings: dict[str, Any] = {
        "step": record.step,
        "previous": record.previous,
        "log_hash": record.log_hash,
        "kl_coefficient": record.header.kl_coefficient,
    }
    wanted = [group for group in run.stateful if groups is None or group.name in groups]
    if record.skipped:
        for group in wanted:
            group.call("apply_record", None, **settings)
        return {"step/skipped": 1.0}
    arrays = prepare(record.arrays, vars(record.header), run.config)
    calls = [
        group.call_sharded(
            "apply_record", {name: column for name, column in arrays.items() if name in UPDATE_COLUMNS}, **settings
        )
        for group in wanted
    ]
    metrics: dict[str, float] = {}
    for call in calls:
        metrics |= call.results()[0]
    return metrics


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
    while (choice := choose(run, group, refs)) is not None:
        if agree and choice.step <= at:
            return int(at)
        try:
            group.call("restore", choice)
        except DamagedError as error:
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


def sync_engines(run: "Run") -> None:
    """Give every engine the policy's weights; the policy stands at the head of the log.

    Where they share their GPUs the engines are asleep until now, and the trainer leaves when they have the weights.
    """

    def sync() -> None:
        run.weights.sync(run.log.head(), run.policy, run.engines)

    if run.hybrid:
        hybrid.to_engines(run.stateful, run.engines, sync)
    else:
        sync()


def take_devices_back(run: "Run") -> None:
    """After generation: where engines and trainer share their GPUs, the engines sleep and the trainer comes back."""
    if run.hybrid:
        hybrid.to_training(run.stateful, run.engines)
