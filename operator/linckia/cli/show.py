"""Tables for people, from the same values that ``--json`` prints."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
SHOWN_RECOVERIES = 5


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
        table.add_row(name, group_words(group))
    for row in status.get("recoveries", [])[-SHOWN_RECOVERIES:]:
        table.add_row("recovered", escape(recovery_words(row)))
    if ratio := _effective(view):
        table.add_row("effective time", ratio)
    for warning in view.get("warnings", []):
        table.add_row("[yellow]warning[/]", escape(warning))
    return table


def group_words(group: Row) -> str:
    """Such as ``generation 2, 2 members, is being replaced; 3 more restarts within this step``."""
    words = f"generation {group.get('generation')}, {count(len(group.get('members', [])), 'member')}"
    if group.get("standbys"):
        words += f", {count(group['standbys'], 'standby')}"
    if group.get("returning"):
        words += ", [yellow]is being replaced[/]"
    if group.get("restarts_left") is not None:
        words += f"; {group['restarts_left']} restarts left in this step"
    return words


def recovery_words(row: Row) -> str:
    """Such as ``policy 1 -> 2, step 7 update, death (...), 12 s ago: 9.8 s (load 6.1, start 2.9)``."""
    parts = sorted(row.get("seconds", {}).items(), key=lambda part: -part[1])
    most = ", ".join(f"{name} {spent:.1f}" for name, spent in parts[:3] if spent >= 0.05)
    return (
        f"{row['group']} {row['generation_lost']} -> {row['generation']}, step {row['step']} {row['stage']}, {row['kind']} "
        f"({row['cause']}), {age(time.time() - row['time'])} ago: {row['seconds_total']:.1f} s"
        + (f" ({most})" if most else "")
    )


def _effective(view: Row) -> str:
    """Both ratios of a live run, where it has lost time."""
    found = {
        sample["labels"]["replay"]: sample["value"]
        for sample in view.get("recovery_metrics", [])
        if "replay" in sample["labels"]
    }
    if not found or found["lost"] >= 1:
        return ""
    return f"{found['useful']:.1%} of this attempt; {found['lost']:.1%} if replayed records count as lost"


def faults_table(rows: Iterable[Row]) -> Table:
    table = _table("fault", "targets", "what it does")
    for row in rows:
        table.add_row(row["fault"], row["targets"], row["explains"])
    return table


def chaos_table(report: Row) -> Table:
    """What came of one fault: what ``linckia chaos`` shows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("struck", f"{report['target']}, process {report['pid']}, generation {report['generation']}")
    table.add_row(
        "in", f"step {report['step']}, {report['stage']}; after it step {report['step_after']}, {report['stage_after']}"
    )
    if report["cause"]:
        table.add_row("cause", escape(report["cause"]))
    for label, name in (("found after", "found_after_seconds"), ("healed after", "healed_after_seconds")):
        if report[name] is not None:
            table.add_row(label, f"{report[name]:.1f} s")
    if report["seconds_by_part"]:
        table.add_row("cost", ", ".join(f"{part} {spent:.2f} s" for part, spent in report["seconds_by_part"].items()))
    for problem in report["problems"]:
        table.add_row("[red]problem[/]", escape(problem))
    if report["healed"] and not report["problems"]:
        table.add_row("state", "[green]healed; every member agrees with the log, no trajectory is recorded twice[/]")
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
