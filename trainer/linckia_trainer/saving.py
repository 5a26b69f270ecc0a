"""The save stage: which tiers are due, what may be deleted. The members copy at once and write behind."""

import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from linckia.api.errors import DamagedError, UserError
from linckia_trainer.groups.failure import first_line
from linckia_trainer.groups.group import ActorGroup, Call
from linckia_trainer.healing import answered, healed
from linckia_trainer.log import attempts
from linckia_trainer.state.retention import records_to_prune, states_to_delete
from linckia_trainer.state.tiers import NODE_MEMORY, RUN_DIRECTORY, Tier, list_states

if TYPE_CHECKING:
    from linckia_trainer.run import Run

COPIED = ("metrics.jsonl", "curves.png", "summary.json", "config.yaml")


LAST_SAVE_SECONDS = 120.0
FINISH_SECONDS = 3600.0  # a store that has not taken the last state by then will not


def finish_saving(run: "Run") -> None:
    """Before the end: the head's state in the run directory, and nothing left being written."""
    wait_until_written(run)
    if not all_written(run, run.log.head()):
        save(run, run.log.head(), last=True)
    wait_until_written(run)
    tidy(run, run.log.head())  # the last state is there only now: older ones may go
    if run.log.head() >= run.config.run.steps:  # all that lasts is in the run directory: give the memory back
        for group in run.stateful:
            healed(run, partial(group.call, "release_node_memory"), group)


def all_written(run: "Run", step: int) -> bool:
    """Whether every rank has written its state of ``step`` to the run directory; begun is not written."""
    return all(
        status["saved"].get(RUN_DIRECTORY) == step
        for group in run.stateful
        for status in healed(run, group.status, group)
    )


def save_what_stands(run: "Run") -> None:
    """Before an end that was not asked for: the states of the groups that stand, in the run directory if it takes them."""
    for group in run.stateful:
        if run.healer.newest(group) is not group or run.healer.returning(group):
            continue
        try:
            group.start("save", [RUN_DIRECTORY], [], True).results(timeout=LAST_SAVE_SECONDS)
        except Exception as error:  # noqa: BLE001 - what ends the run matters more than that one more state was not saved
            run.warn(f"{group.name} could not be saved once more: {first_line(error)}; its older states are kept")


def save_beginning(run: "Run") -> None:
    """State 0 is in every tier before step 1: even the first step can be undone."""
    if run.log.head() == 0:
        save(run, 0)
        wait_until_written(run)


def wait_until_written(run: "Run") -> None:
    for group in run.stateful:
        healed(run, partial(group.call, "finish_saving", FINISH_SECONDS), group)


def save(run: "Run", step: int, last: bool = False) -> None:
    """Save the states of ``step`` to the tiers that are due; with ``last`` to the run directory, and wait for it."""
    tiers = due_tiers(run, step, last)
    if not tiers:
        return
    # All groups copy at once; one that is lost meanwhile saves when it is healed.
    run.healer.settle(*run.stateful)
    calls = {group.name: start_saving(run, group, tiers, last) for group in run.stateful}
    for group in run.stateful:
        again = partial(start_saving, run, group, tiers, last)
        results = answered(run, group, calls[group.name], again)
        note_written(run, group, [result["written"].get(NODE_MEMORY, -1) for result in results])
        for tier in results[0]["skipped"]:
            run.warn(
                f"{group.name}: the state of step {step} was not saved to {tier}: an older one is still being written"
            )
    if RUN_DIRECTORY in tiers:
        run.last_checkpoint, run.last_checkpoint_time = step, time.monotonic()
        run.checkpoint_requested.clear()
        tidy(run, step)


def tidy(run: "Run", step: int) -> None:
    """What follows a checkpoint: nothing that the run needs, so a full or failing storage ends nothing here."""
    try:
        apply_retention(run)
        copy_local_files(run.folder, run)
    except DamagedError:
        raise
    except (OSError, UserError) as error:
        run.warn(f"after step {step}: older states were not deleted, or metrics not copied: {error}")


def start_saving(run: "Run", group: ActorGroup, tiers: list[str], last: bool) -> Call:
    return group.start("save", tiers, run.complete_states.setdefault(group.name, []), last)


def due_tiers(run: "Run", step: int, last: bool) -> list[str]:
    storage = run.config.storage
    durable = storage.run_directory
    waited = (time.monotonic() - run.last_checkpoint_time) / 60
    if last:
        return [RUN_DIRECTORY]
    tiers = []
    if storage.node_memory is not None and step % storage.node_memory.every == 0:
        tiers.append(NODE_MEMORY)
    if (
        step % durable.every == 0
        or (durable.minutes is not None and waited >= durable.minutes)
        or run.checkpoint_requested.is_set()
    ):
        tiers.append(RUN_DIRECTORY)
    return tiers


def note_written(run: "Run", group: ActorGroup, written: list[int]) -> None:
    """Remember the newest node-memory state that every rank has written; only such ones make older ones deletable."""
    steps = run.complete_states[group.name]
    newest = written[0]
    if newest >= 0 and set(written) == {newest} and newest not in steps:
        steps.append(newest)
    keep = run.config.storage.node_memory.keep if run.config.storage.node_memory else 2
    del steps[:-keep]


def apply_retention(run: "Run") -> None:
    """Delete what no recovery needs. A replaced attempt deletes nothing."""
    if attempts.superseded(run.store, run.attempt):
        return
    storage, log = run.config.storage, run.log
    durable = Tier(RUN_DIRECTORY, run.store)
    steps: dict[str, set[int]] = {}
    for group in run.stateful:
        refs = list_states([durable], group.name, run.config.run.name)
        gone = states_to_delete(refs, storage.run_directory.keep, len(group.members), log.head(), log.hash_at)
        for ref in gone:
            run.store.delete(ref.key)
        steps[group.name] = {ref.step for ref in refs if ref not in gone and ref.invalid is None}
    if storage.log_keep is not None:
        log.prune(records_to_prune(log.head(), steps, storage.log_keep))


def copy_local_files(folder: Path, run: "Run") -> None:
    """Metrics, curves and summary beside the log, where the run directory is not the local folder itself."""
    if run.store.uri == str(folder):
        return
    for name in COPIED:
        if (folder / name).exists():
            run.store.put(f"local/{name}", (folder / name).read_bytes())


def free_bytes(folder: str) -> int:
    return shutil.disk_usage(folder).free
