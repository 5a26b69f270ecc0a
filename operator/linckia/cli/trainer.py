"""The one module of the control plane that calls the data plane. Imports stand in the functions: they are heavy."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linckia.api.config import RunConfig
from linckia.api.errors import DamagedError, LiveRunError, UserError
from linckia.cli.runs import RunPlace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from linckia_trainer.log.chain import RunLog
    from linckia_trainer.log.store import Store
    from linckia_trainer.state.tiers import StateRef, Tier

Row = dict[str, Any]


def train(
    config: RunConfig,
    config_path: str,
    address: str | None,
    takeover: bool,
    fork: str | None,
    fresh: bool,
    quiet: bool,
    sources: Sequence[RunConfig],
) -> int:
    from linckia_trainer import entry

    return entry.train(config, config_path, address, takeover, fork, fresh, quiet, sources)


# ---- looking -----------------------------------------------------------------------------------------------------


def local_numbers(place: RunPlace) -> Row:
    """``last`` (the last step's metric row) and ``summary`` of a run, None where there is none."""
    from linckia_trainer.metrics.names import EVALUATION_SCORE
    from linckia_trainer.metrics.sinks import read_rows
    from linckia_trainer.metrics.summary import read_summary

    with _metrics_folder(place) as folder:
        rows, summary = read_rows(folder), read_summary(folder)
    scores = [row[EVALUATION_SCORE] for row in rows if row.get(EVALUATION_SCORE) is not None]
    return {
        "last": rows[-1] if rows else None,
        "held_out_score": scores[-1] if scores else None,
        "summary": asdict(summary) if summary else None,
    }


def history(place: RunPlace) -> Row:
    """What the run directory says: its newest attempt, how that ended, and the log's head."""
    from linckia_trainer.log import attempts

    run = _open(place)
    ended = attempts.outcome(run.store, run.attempt)
    alive = ended is None and attempts.is_live(run.store, attempts.read(run.store, run.attempt))
    return {
        "attempt": run.attempt,
        "state": ended.outcome if ended else "live" if alive else "interrupted",
        "cause": ended.cause if ended else "",
        "log_head": run.log.head(),
        "steps": run.config.run.steps,
    }


def attempts(place: RunPlace, process: tuple[int, int] | None) -> Row:
    """What a supervisor asks of a run directory: ``newest`` claim (None if there is none), the log's ``head``, and of the
    ``attempt`` that a process of this host claimed, by (pid, start time), how it ended (0 and no words if it claimed none)."""
    from linckia_trainer.log import attempts
    from linckia_trainer.log.chain import RunLog
    from linckia_trainer.log.process import this_host
    from linckia_trainer.log.store import Store

    store = Store(place.uri, place.options)
    claims = (attempts.read(store, number) for number in reversed(attempts.numbers(store)))
    ours = (0, None) if process is None else process
    mine = next((one.attempt for one in claims if (one.host, one.pid, one.start_time) == (this_host(), *ours)), 0)
    newest, ended = attempts.latest(store), attempts.outcome(store, mine) if mine else None
    return {
        "attempt": mine,
        "newest": None if newest is None else {"attempt": newest.attempt, "claimed": newest.claimed},
        "head": RunLog(store, None).head(),
        "cause": ended.cause if ended else "",
        "fingerprint": ended.fingerprint if ended else "",
        "kind": ended.kind if ended else "",
    }


def render_summary(summary: Row, folder: Path) -> "RenderableType":
    from linckia_trainer.metrics.summary import Summary
    from linckia_trainer.metrics.summary import render_summary as render

    return render(Summary(**summary), folder)


def samples(place: RunPlace, step: int) -> list[Row]:
    """Prompts, answers and rewards of one step, from the log."""
    from linckia_trainer.checks import open_model
    from linckia_trainer.experience.samples import read_samples

    run = _open(place)
    if step not in run.log.steps():
        known = run.log.steps()
        held = f"steps {known[0]} to {known[-1]}" if known else "no record yet"
        raise UserError("--step", step, f"the log of {place.name} holds {held}", "choose one of them")
    tokenizer, _ = open_model(run.config.model.path)
    return read_samples(run.log.read(step), tokenizer)


# ---- recoveries --------------------------------------------------------------------------------------------------


def recoveries(place: RunPlace) -> list[Row]:
    """Every recovery that ended well, oldest first, with its seconds by part."""
    from linckia_trainer.log import recoveries as written

    return [asdict(one) for one in written.recoveries(_open(place).store)]


def log_hash(place: RunPlace, step: int) -> str | None:
    """The log's hash after a step; None if the log does not hold it."""
    return _open(place).log.hash_at(step)


def repeated_trajectories(place: RunPlace) -> list[tuple[int, int]]:
    """(position, sample) of trajectories that the log holds more than once; there should be none."""
    log = _open(place).log
    seen: set[tuple[int, int]] = set()
    repeated = []
    for step in log.steps():
        arrays = log.read(step).arrays
        for position, sample in zip(arrays["positions"].tolist(), arrays["samples"].tolist(), strict=True):
            if (position, sample) in seen:
                repeated.append((position, sample))
            seen.add((position, sample))
    return repeated


def state_folders(place: RunPlace) -> list[Path]:
    """The tiers of this run that are folders of this machine."""
    return [tier.store.folder for tier in _open(place).tiers if tier.store.folder is not None]


# ---- checkpoints -------------------------------------------------------------------------------------------------


def list_checkpoints(place: RunPlace) -> list[Row]:
    """Every saved state, newest first, with the verdict on it; ``restores``: a new attempt would start from it."""
    run = _open(place)
    return _verdicts(run, {group: _states(run, group) for group in run.worlds})


def verify(place: RunPlace) -> Row:
    """Read every byte of every state and record. ``problems``: what stops or weakens the run; ``warnings``: the rest."""
    from linckia_trainer.state.tiers import verify_state

    run = _open(place)
    checked: dict[str, list[StateRef]] = {}
    for group in run.worlds:
        refs = _states(run, group)
        checked[group] = [ref if ref.invalid else replace(ref, invalid=verify_state(run.tiers, ref)) for ref in refs]
    rows = _verdicts(run, checked)
    problems = [f"{row['group']} step {row['step']}: {row['reason']}" for row in rows if row["damaged"]]
    restored = {row["group"]: row["step"] for row in rows if row["restores"]}
    problems += [f"{group}: no state can be restored" for group in run.worlds if group not in restored]
    try:
        warnings = run.log.verify(min(restored.values(), default=0), deep=True)
    except DamagedError as error:
        warnings = []
        problems.append(str(error))
    return {"states": rows, "records": len(run.log.steps()), "problems": problems, "warnings": warnings}


def prune(place: RunPlace, dry_run: bool) -> Row:
    """Delete states and records that the config does not keep and no recovery needs. Refused while the run is live."""
    from linckia_trainer.state.retention import records_to_prune, states_to_delete
    from linckia_trainer.state.tiers import RUN_DIRECTORY, verify_state

    run = _open(place)
    _refuse_live(run)
    storage = run.config.storage
    states: list[Row] = []
    durable: dict[str, set[int]] = {}
    for tier in run.tiers:
        in_node_memory = tier.name != RUN_DIRECTORY
        kept = storage.node_memory if in_node_memory and storage.node_memory is not None else storage.run_directory
        for group, world in run.worlds.items():
            refs = [ref for ref in _states(run, group) if ref.tier == tier.name]
            refs = [ref if ref.invalid else replace(ref, invalid=verify_state(run.tiers, ref)) for ref in refs]
            gone = states_to_delete(refs, kept.keep, world, run.log.head(), run.log.hash_at)
            states += [{"tier": tier.name, "key": ref.key, "bytes": ref.size} for ref in gone]
            if not in_node_memory:
                left = {group: [ref for ref in refs if ref not in gone]}
                durable[group] = {row["step"] for row in _verdicts(run, left) if row["valid"]}
            for ref in gone if not dry_run else []:
                tier.store.delete(ref.key)
    steps = list(records_to_prune(run.log.head(), durable, storage.log_keep))
    steps = [step for step in steps if step in run.log.steps()]
    if steps and not dry_run:
        run.log.prune(steps)
    return {"states": states, "bytes": sum(state["bytes"] for state in states), "records": steps}


def rewind(place: RunPlace, to_step: int) -> list[str]:
    """Move everything after ``to_step`` aside; returns what was moved."""
    from linckia_trainer.metrics.sinks import mark_rewind
    from linckia_trainer.state import rewind as state
    from linckia_trainer.state.tiers import NODE_MEMORY

    run = _open(place)
    _refuse_live(run)
    node_memory = next((tier.store for tier in run.tiers if tier.name == NODE_MEMORY), None)
    moved = state.rewind(run.store, node_memory, to_step, run.worlds, log=run.log, live=False)
    if place.folder is not None:
        mark_rewind(place.folder, to_step)
    return moved


def export(place: RunPlace, step: int | None, to_folder: Path) -> int:
    """Write a checkpoint (the newest, without ``step``) as a Hugging Face folder; returns its step."""
    from linckia_trainer.state.export import export_checkpoint

    return export_checkpoint(place.uri, place.options, step, to_folder)


# ---- parts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OpenRun:
    name: str
    store: "Store"
    log: "RunLog"
    attempt: int
    config: RunConfig
    tiers: list["Tier"]
    worlds: dict[str, int]


def _open(place: RunPlace) -> _OpenRun:
    from linckia_trainer.log import attempts
    from linckia_trainer.log.chain import RunLog
    from linckia_trainer.log.store import Store
    from linckia_trainer.state.tiers import RUN_DIRECTORY, Tier, node_memory, node_memory_folder

    store = Store(place.uri, place.options)
    newest = attempts.latest(store)
    if newest is None or not newest.config:
        raise UserError("RUN", place.uri, "no run has started there", "check the name, or train it first")
    config = RunConfig.model_validate(newest.config)
    worlds = {"policy": config.policy.world_size}
    if config.has_critic:
        worlds["critic"] = config.critic.world_size
    tiers = [Tier(RUN_DIRECTORY, store)]
    if config.storage.node_memory is not None and node_memory_folder(config).is_dir():
        tiers.insert(0, node_memory(config))
    return _OpenRun(config.run.name, store, RunLog(store, None), newest.attempt, config, tiers, worlds)


def _states(run: _OpenRun, group: str) -> list["StateRef"]:
    from linckia_trainer.state.tiers import list_states

    return list_states(run.tiers, group, run.name)


def _verdicts(run: _OpenRun, refs: dict[str, list["StateRef"]]) -> list[Row]:
    from linckia_trainer.state.choose import candidates

    now, rows = time.time(), []
    for group, found in refs.items():
        judged = candidates(found, run.worlds[group], run.log.head(), run.log.hash_at)
        restores = next((one for one in judged if one.refused is None), None)
        for one in judged:
            rows.append(
                {
                    "step": one.step,
                    "group": group,
                    "attempt": one.attempt,
                    "generation": one.generation,
                    "tiers": list(dict.fromkeys(ref.tier for ref in one.refs)),
                    "ranks": sorted({ref.rank for ref in one.refs}),
                    "bytes": sum(ref.size for ref in one.refs),
                    "age_seconds": round(now - max(ref.modified for ref in one.refs), 1),
                    "valid": one.refused is None,
                    "reason": one.refused or "",
                    "damaged": any(ref.invalid for ref in one.refs),
                    "restores": one is restores,
                }
            )
    return sorted(rows, key=lambda row: (-row["step"], row["group"] != "policy", -row["attempt"]))


def _refuse_live(run: _OpenRun) -> None:
    from linckia_trainer.log import attempts

    if attempts.is_live(run.store, attempts.read(run.store, run.attempt)):
        raise LiveRunError("RUN", run.name, f"attempt {run.attempt} is live", f"stop it with `linckia stop {run.name}`")


@contextmanager
def _metrics_folder(place: RunPlace) -> Iterator[Path]:
    """The run's local folder, or a passing copy of what the run directory holds of it."""
    if place.folder is not None:
        yield place.folder
        return
    from linckia_trainer.local import fetch_local
    from linckia_trainer.log.store import Store

    with tempfile.TemporaryDirectory() as folder:
        fetch_local(Store(place.uri, place.options), Path(folder))
        yield Path(folder)
