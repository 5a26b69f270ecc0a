"""``linckia checkpoints``: what was saved, and what can be done with it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run in ./runs, a folder, or a URI.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class ListByDefault(TyperGroup):
    """``linckia checkpoints RUN`` is ``linckia checkpoints list RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListByDefault,
    no_args_is_help=True,
    help="List, check and use what a run has saved. `linckia checkpoints RUN` lists it.",
)


@app.command("list")
def list_(run: RunArgument, json: JsonOption = False) -> None:
    """List the saved states: step, size, age, tier, and whether a run could go on from them.

    Reads their headers; `verify` reads every byte.
    """
    from linckia.cli import runs, show, trainer

    rows = trainer.list_checkpoints(runs.find_run(run))
    if json:
        show.print_json(rows)
    elif rows:
        show.out().print(show.checkpoints_table(rows))
    else:
        show.out().print("nothing is saved yet")


@app.command()
def verify(run: RunArgument, json: JsonOption = False) -> None:
    """Read every byte of every saved state and record, and check the log's chain. Exits 1 if something is damaged."""
    from linckia.cli import runs, show, trainer

    found = trainer.verify(runs.find_run(run))
    if json:
        show.print_json(found)
    else:
        console = show.out()
        console.print(show.checkpoints_table(found["states"]))
        console.print(f"{show.count(found['records'], 'record')} in the log")
        for kind, style in (("problems", "red"), ("warnings", "yellow")):
            for text in found[kind]:
                console.print(f"{kind[:-1]}: {text}", style=style, markup=False)
        if not found["problems"]:
            console.print("[green]everything a run needs to go on is whole[/]")
    if found["problems"]:
        raise typer.Exit(1)


@app.command()
def prune(
    run: RunArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete the states and records that storage.*.keep and storage.log_keep do not keep and no recovery needs.

    A live run does this by itself; here it must not be live.
    """
    from linckia.cli import show, trainer

    gone = trainer.prune(_not_live(run), dry_run)
    if json:
        show.print_json(gone)
        return
    would = "would go" if dry_run else "deleted"
    for state in gone["states"]:
        show.out().print(
            f"{state['tier']}: {state['key']} ({show.size(state['bytes'])})", markup=False, highlight=False
        )
    show.out().print(
        f"{show.count(len(gone['states']), 'state')} ({show.size(gone['bytes'])}) and "
        f"{show.count(len(gone['records']), 'record')} {would}"
    )


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; it must not exist or be empty.")],
    step: Annotated[int | None, typer.Option("--step", help="Of which step; default: the newest checkpoint.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder that transformers and vLLM load."""
    from linckia.api.errors import UserError
    from linckia.cli import runs, show, trainer

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError("--to", str(to), "it exists and is not an empty folder", "give a new folder")
    exported = trainer.export(runs.find_run(run), step, to)
    if json:
        show.print_json({"step": exported, "folder": str(to.absolute())})
    else:
        show.out().print(f"step {exported} is written to {to}", markup=False)


@app.command()
def rewind(
    run: RunArgument,
    to: Annotated[int, typer.Option("--to", metavar="STEP", min=0, help="The last step to keep.")],
    json: JsonOption = False,
) -> None:
    """Take a run back to a step: later records and states are moved aside into rewound/N, never deleted.

    For a log with a damaged record, or to try another way on from there. The run must not be live.
    """
    from linckia.cli import show, trainer

    moved = trainer.rewind(_not_live(run), to)
    if json:
        show.print_json({"step": to, "moved": moved})
    else:
        show.out().print(f"{run} is at step {to}; moved aside: {show.count(len(moved), 'object')}", markup=False)


def _not_live(run: str) -> Any:
    from linckia.api.errors import LiveRunError
    from linckia.cli import client, runs

    place = runs.find_run(run)
    if client.get_view(place) is not None:
        raise LiveRunError("RUN", place.name, "it is live", f"stop it with `linckia stop {place.name}`")
    return place
