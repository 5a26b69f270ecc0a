"""Tables for people, from the same values that ``--json`` prints."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]


def print_json(value: object) -> None:
    """For programs: JSON on stdout and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def out() -> Console:
    """Stdout. Lines are as wide as they need to be where nobody reads them on a screen."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def age(seconds: float) -> str:
    """Such as ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(num_bytes: float) -> str:
    """Such as ``4.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def count(amount: int, noun: str) -> str:
    """Such as ``1 member``, ``2 members``."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def runs_table(rows: Sequence[Row]) -> Table:
    table = _table("run", "state", "step", "held-out", "started", "where")
    for row in rows:
        started = f"{age(row['age_seconds'])} ago"
        table.add_row(
            row["name"], row["state"], str(row["step"]), number(row["held_out_score"]), started, escape(row["uri"])
        )
    return table


def status_table(status: Row) -> Table:
    """A run, live or not: what ``linckia status RUN`` shows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    last, view = status["last"] or {}, status["live"] or {}
    table.add_row("run", f"{status['name']} ({escape(status['uri'])})")
    cause = f": {status['cause']}" if status["cause"] else ""
    table.add_row("state", f"{status['state']}, attempt {status['attempt']}{escape(cause)}")
    stage = f", {view['stage']}" if view.get("stage") else ""
    table.add_row(
        "step", f"{status['step']} of {status['steps']}{stage}; the log has {count(status['log_head'], 'record')}"
    )
    if view.get("seconds_left") is not None:
        table.add_row("time left", age(view["seconds_left"]))
    for label, name, digits in (
        ("reward", "reward/mean", 3),
        ("KL", "kl/reference", 4),
        ("tokens/s", "step/tokens_per_second", 0),
    ):
        if last.get(name) is not None:
            table.add_row(label, number(last[name], digits))
    table.add_row("held-out score", number(status["held_out_score"]))
    for name, group in view.get("groups", {}).items():
        table.add_row(name, f"generation {group.get('generation')}, {count(len(group.get('members', [])), 'member')}")
    for warning in view.get("warnings", []):
        table.add_row("[yellow]warning[/]", escape(warning))
    return table


def checkpoints_table(rows: Iterable[Row]) -> Table:
    table = _table("step", "group", "tier", "ranks", "size", "age", "attempt", "validity")
    for row in rows:
        validity = "[green]valid[/]" if row["valid"] else f"[red]{escape(row['reason'])}[/]"
        if row["restores"]:
            validity += ", the next start restores it"
        table.add_row(
            str(row["step"]),
            row["group"],
            ", ".join(row["tiers"]),
            str(len(row["ranks"])),
            size(row["bytes"]),
            age(row["age_seconds"]),
            f"{row['attempt']}.{row['generation']}",
            validity,
        )
    return table


def print_samples(console: Console, rows: Iterable[Row], limit: int) -> None:
    """Prompt, answer and reward of each sample, at most ``limit``; text goes out as it is, never as markup."""
    rows = list(rows)
    for row in rows[:limit]:
        parts = "".join(f", {name} {value:.3g}" for name, value in row["parts"].items())
        end = "" if row["finished"] else ", cut off at max_new_tokens"
        heading = f"position {row['position']}, sample {row['sample']}: reward {row['reward']:.4g}{parts}"
        console.rule(f"[bold]{escape(heading)}[/] ({row['answer_tokens']} tokens{end})", align="left")
        console.print(row["prompt"], style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print(row["answer"], markup=False, highlight=False, soft_wrap=True)
    if len(rows) > limit:
        console.print(f"{len(rows) - limit} more; --limit shows them")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table
