"""``linckia chaos``: strike a live run on this machine, and report what came of it."""

import dataclasses
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from linckia.cli.checkpoints import JsonOption

Row = dict[str, Any]
AGREE_SECONDS = 60.0
WRITTEN_SECONDS = 10.0
TRY_IT = "such as `linckia chaos RUN --fault kill --target policy`"


def chaos(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A live run: a name in ./runs, a folder, or a URI.")
    ] = None,
    fault: Annotated[str | None, typer.Option(help="What strikes; --list shows them.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="GROUP[/RANK]", help="Whom, such as rollout-0 or policy/1.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Strike in this stage of a step, such as update; default: now.")
    ] = None,
    at: Annotated[int | None, typer.Option(metavar="STEP", min=0, help="Strike at this step or a later one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a fault lasts that ends by itself.")] = 30.0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the moment, and then for the healing.")
    ] = 600.0,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults.")] = False,
    json: JsonOption = False,
) -> None:
    """Strike a live run on this machine with a fault, wait until it is healed, and show what that cost.

    Exits 1 if the run was not healed, or does not agree with its log afterwards.
    """
    from linckia.api.errors import UserError
    from linckia.cli import show
    from linckia.faults.inject import FAULTS

    if list_faults:
        rows = [{"fault": name, "targets": one.targets, "explains": one.explains} for name, one in FAULTS.items()]
        if json:
            show.print_json(rows)
        else:
            show.out().print(show.faults_table(rows))
        return
    for option, value in (("RUN", run), ("--fault", fault)):
        if value is None:
            raise UserError(option, None, "is missing", f"give it, {TRY_IT}; --list shows the faults")
    assert run is not None
    assert fault is not None
    report = strike(run, fault, target, stage, at, seconds, timeout, quiet=json)
    if json:
        show.print_json(report)
    else:
        show.out().print(show.chaos_table(report))
    raise typer.Exit(0 if report["healed"] and not report["problems"] else 1)


def strike(
    run: str,
    fault_name: str,
    target: str | None,
    stage: str | None,
    at: int | None,
    seconds: float,
    timeout: float,
    quiet: bool,
) -> Row:
    """The report of one fault. UserError for what does not exist, and for a run that is not live here."""
    from linckia.api.errors import UserError
    from linckia.cli import client, runs, show, trainer
    from linckia.faults import aim as aiming
    from linckia.faults import trial
    from linckia.faults.inject import FAULTS, Aim

    fault = aiming.choose_fault(FAULTS, fault_name)
    place = runs.find_run(run)
    view: Mapping[str, Any] | None = client.get_view(place)
    if view is None:
        raise UserError("RUN", run, "no controller of this run answers", "start it with `linckia train`, then strike")
    if fault.targets == "controller":
        target = aiming.CONTROLLER
    if target is None:
        there = ", ".join(aiming.targets(view, fault))
        raise UserError("--target", None, f"is missing; this fault takes {there}", f"give it, {TRY_IT}")
    aiming.check_target(view, target, fault)
    folders = tuple(trainer.state_folders(place)) if fault.targets == "state" else ()

    def look() -> Row | None:
        return client.get_view(runs.find_run(run), timeout=10.0)  # found again: the next attempt listens elsewhere

    def find(view: Mapping[str, Any]) -> Aim | None:
        assert target is not None
        if fault.targets == "controller":
            file = runs.find_run(run).file
            assert file is not None, "it answered, so it was found by its file"
            return aiming.aim_at_controller(file.pid, file.host == socket.gethostname())
        found = aiming.aim_at(view, target)
        return None if found is None else dataclasses.replace(found, states=folders, seconds=seconds)

    clock = trial.Clock()
    view, aim = trial.await_moment(look, find, target, trial.Moment(stage, at), timeout, clock)
    witness = trial.strike(look, fault, view, aim, clock)
    if not quiet:
        show.out().print(f"struck {witness.target} (process {witness.pid}) in step {witness.step}, {witness.stage}")
    healed = trial.await_healed(look, fault, witness, timeout, clock)
    record = _recovery_of(place, witness) if healed is not None and fault.healed_by == "replacement" else None
    problems = []
    if healed is None:
        problems.append(f"it was not seen healed within {timeout:.0f} s")
    else:
        problems += trial.await_agreement(look, lambda step: trainer.log_hash(place, step), AGREE_SECONDS, clock)
    repeated = trainer.repeated_trajectories(place)
    problems += [f"trajectory {position}, {sample} is recorded twice" for position, sample in repeated]
    found_after = record["time"] - witness.time if record else None
    return {
        "fault": fault_name,
        **dataclasses.asdict(witness),
        "healed": healed is not None,
        "found_after_seconds": found_after,
        "healed_after_seconds": (found_after + record["seconds_total"] if record and found_after is not None else None)
        or (healed - witness.time if healed else None),
        "cause": record["cause"] if record else None,
        "seconds_by_part": record["seconds"] if record else {},
        "problems": problems,
    }


def _recovery_of(place: Any, witness: Any) -> Row | None:
    """What the run wrote down of the recovery from a strike; it does so a moment after the group is back."""
    from linckia.cli import trainer

    group = witness.target.rpartition("/")[0]
    deadline = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < deadline:
        for row in trainer.recoveries(place):
            if row["group"] == group and row["attempt"] == witness.attempt and row["time"] >= witness.time - 1:
                return row
        time.sleep(0.2)
    return None
