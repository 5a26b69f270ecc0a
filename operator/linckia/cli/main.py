"""The ``linckia`` command: parse and check first, import what is heavy after.

Exit codes: 0 done; 1 `checkpoints verify` found damage, or `chaos` no healing; 2 something the user can put right; 3 a crash
loop: it would fail again; 4 replaced by a newer attempt.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from linckia.cli import checkpoints
from linckia.cli.arguments import ConfigArgument, OverridesArgument
from linckia.cli.chaos import chaos
from linckia.cli.checkpoints import JsonOption, RunArgument
from linckia.cli.operator import operator
from linckia.cli.render import render

app = typer.Typer(
    name="linckia",
    help="RLHF on Ray that regrows: PPO whose every step is committed to a log before it is trained on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(chaos)
app.command()(render)
app.command(hidden=True)(operator)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"linckia {version('linckia')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None: ...


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster that stands, such as auto or HOST:6379; default: Ray on this machine."),
    ] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="Replace an attempt of this run that is alive.")] = False,
    fork: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a new run NAME that goes on from this run's newest checkpoint."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from nothing; an earlier run is moved aside.")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Start the controller again when it dies, until the run ends.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Train a run, or go on with it: the same command after any crash takes it up where it stood.

    A finished run prints its summary.
    """
    from linckia.api.names import SUPERVISOR_VARIABLE

    if SUPERVISOR_VARIABLE in os.environ:
        from linckia.cli.supervise import follow_supervisor

        follow_supervisor()
    from linckia.api.config import RunName
    from linckia.api.errors import UserError
    from linckia.api.load import fork_sources, load_config
    from linckia.api.plan import plan as make_plan

    typed, config = config, _enter_bundle(config)
    if fork is not None and fresh:
        raise UserError("--fresh", None, "a fork starts from a checkpoint", "give --fork or --fresh")
    if fork is not None and supervise:
        raise UserError(
            "--supervise", None, "a fork is made once", f"give --fork alone, then --supervise with run.name={fork}"
        )
    if fork is not None:
        _check_name("--fork", fork, RunName)
    loaded = load_config(config, overrides or ())
    make_plan(loaded, gpus=loaded.placement.device == "gpu")  # what contradicts itself is said before anything starts
    if supervise:
        from linckia.cli.supervise import supervise as keep_running

        arguments = [typed, *(overrides or ()), *(["--address", address] if address else []), *["--quiet"] * quiet]
        raise typer.Exit(keep_running(loaded, arguments, takeover, fresh))
    sources = fork_sources(config, overrides or ()) if fork is not None else []
    from linckia.cli import trainer

    raise typer.Exit(trainer.train(loaded, config, address, takeover, fork, fresh, quiet, sources))


@app.command()
def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[
        bool | None, typer.Option("--gpus/--cpu", help="On GPUs or CPUs; default: placement.device, or what is here.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show where a run's actors would go: groups, placement groups, bundles and fractions. Starts nothing."""
    from linckia.api.load import load_config
    from linckia.api.plan import plan as make_plan
    from linckia.api.plan_view import plan_to_json, render_plan
    from linckia.cli import show

    loaded = load_config(config, overrides or ())
    if gpus is None:
        device = loaded.placement.device
        gpus = device == "gpu" or (device == "auto" and Path("/dev/nvidia0").exists())
    made = make_plan(loaded, gpus)
    if json:
        show.print_json(plan_to_json(made))
    else:
        show.out().print(render_plan(made))


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run in ./runs, a folder, or a URI.")] = None,
    json: JsonOption = False,
) -> None:
    """Show a run, live or ended; without RUN, list the runs in ./runs."""
    from linckia.cli import runs, show

    if run is None:
        rows = [_brief(place) for place in runs.list_runs()]
        if json:
            show.print_json(rows)
        elif rows:
            show.out().print(show.runs_table(rows))
        else:
            show.out().print("there is no run in ./runs; `linckia train CONFIG` makes one")
        return
    place = runs.find_run(run)
    found = _status(place)
    if json:
        show.print_json(found)
        return
    show.out().print(show.status_table(found))
    if found["summary"] is not None and found["live"] is None:
        from linckia.cli import trainer

        show.out().print(trainer.render_summary(found["summary"], place.folder or Path(place.uri)))


@app.command()
def watch(
    run: RunArgument,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one look to the next.")] = 1.0,
) -> None:
    """Show a live run's status, again every second, until it has ended."""
    from rich.live import Live

    from linckia.cli import runs, show

    found = _status(runs.find_run(run))
    with Live(show.status_table(found), console=show.out(), auto_refresh=False) as screen:
        while found["state"] == "live":
            time.sleep(every)
            found = _status(runs.find_run(run))
            screen.update(show.status_table(found), refresh=True)


@app.command()
def samples(
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="The step whose record to read.")],
    limit: Annotated[int, typer.Option(min=1, help="How many to show; --json shows all.")] = 10,
    json: JsonOption = False,
) -> None:
    """Show prompts, answers and rewards of a step, from the log."""
    from linckia.cli import runs, show, trainer

    rows = trainer.samples(runs.find_run(run), step)
    if json:
        show.print_json(rows)
    else:
        show.print_samples(show.out(), rows, limit)


@app.command()
def stop(run: RunArgument, json: JsonOption = False) -> None:
    """Ask a live run to stop after the step it is in, with everything saved. `linckia train` goes on with it."""
    from linckia.cli import client, runs, show

    place = runs.find_run(run)
    answer = client.ask(place, "stop")
    if json:
        show.print_json({"run": place.name, **answer})
        return
    show.out().print(f"{place.name} will stop after this step; the same `linckia train` goes on with it", markup=False)


@app.command()
def scale(
    run: RunArgument,
    engines: Annotated[int, typer.Option("--engines", help="how many rollout engines the run should have from now on")],
) -> None:
    """Add rollout engines to a live run, or take some away; nothing that is being generated is lost."""
    from linckia.cli import client, runs, show

    place = runs.find_run(run)
    client.order(place, "/v1/roles/rollout/scale", {"engines": engines})
    show.out().print(f"{place.name} goes to {engines} engines; `linckia status {place.name}` shows them", markup=False)


def _status(place: Any) -> dict[str, Any]:
    """Everything that is known of a run; ``live`` is what its controller answers, None if none does."""
    from linckia.cli import client, trainer

    view = client.get_view(place)
    found = {
        "name": place.name,
        "uri": place.uri,
        "live": view,
        **trainer.history(place),
        **trainer.local_numbers(place),
    }
    found["step"] = found["log_head"]
    found["recoveries"] = trainer.recoveries(place)
    if view is not None:
        found |= {
            "state": "live",
            "step": view.get("step", found["step"]),
            "attempt": view.get("attempt", found["attempt"]),
        }
        found["last"] = {**(found["last"] or {}), **view.get("metrics", {})} or None
    return found


def _brief(place: Any) -> dict[str, Any]:
    """A run in a list, from what is on this machine."""
    from linckia.api.errors import UserError
    from linckia.cli import client, trainer

    numbers = trainer.local_numbers(place)
    summary = numbers["summary"]
    try:
        live = client.get_view(place, timeout=1.0) is not None
    except UserError:
        live = True  # it answers, to whoever has its token
    ended = summary["outcome"] if summary and summary["attempts"] >= place.file.attempt else "interrupted"
    return {
        "name": place.name,
        "uri": place.uri,
        "state": "live" if live else ended,
        "step": numbers["last"]["step"] if numbers["last"] else 0,
        "held_out_score": numbers["held_out_score"],
        "age_seconds": round(time.time() - place.file.started, 1),
    }


def _enter_bundle(config: str) -> str:
    """The config's path. One that a job carries in its environment is unpacked, and its folder becomes the current one."""
    from linckia.api.bundle import unpack_here
    from linckia.api.errors import UserError
    from linckia.api.names import BUNDLE, BUNDLE_VARIABLE

    if config != BUNDLE:
        return config
    found = unpack_here()
    if found is None:
        raise UserError(
            BUNDLE_VARIABLE, None, "is not set", "write the job with `linckia render`, or give a config's path"
        )
    os.chdir(found[0])
    return str(found[1])


def _check_name(option: str, name: str, kind: Any) -> None:
    from pydantic import TypeAdapter, ValidationError

    from linckia.api.errors import UserError

    try:
        TypeAdapter(kind).validate_python(name)
    except ValidationError as error:
        reason = str(error.errors()[0]["ctx"]["error"]) if name else "must not be empty"
        raise UserError(option, name, reason, "give another name") from None


def main() -> None:
    """The console script."""
    from linckia.api.errors import FencedError, UserError

    try:
        app()
    except UserError as error:
        _say(error)
        sys.exit(error.exit_code)
    except FencedError as error:
        _say(error)
        sys.exit(4)


def _say(error: Exception) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text("error: ", style="bold red") + Text(str(error)))


if __name__ == "__main__":
    main()
