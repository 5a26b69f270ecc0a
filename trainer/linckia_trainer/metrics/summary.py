"""A run in a handful of numbers: ``summary.json``, and the same for a person, with what to type next."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from linckia_trainer.metrics import names
from linckia_trainer.metrics.recovery import effective_ratio
from linckia_trainer.metrics.sinks import Row

FILE = "summary.json"


@dataclass(frozen=True)
class Summary:
    """Written when an attempt ends. ``outcome``: finished, stopped or failed. Seconds are the loop's, start-up apart.

    ``eval_before`` is the held-out score before step 1, ``eval_after`` the last one; None without held-out data.
    ``tokens``: prompt and answer tokens of all records. ``attempts``: the number of the last attempt.
    ``effective_time_ratio``: the share of ``seconds`` that the loop did not wait for lost groups, with replayed records counted
    as training time; with ``_replay_lost`` they count as lost. What a restart of the controller takes is in neither.

    Example: ``Summary(run="sort-seed1", uri="runs/sort-seed1", outcome="finished", steps=100, attempts=1, ...)``
    """

    run: str
    uri: str
    outcome: str
    steps: int
    attempts: int
    eval_before: float | None
    eval_after: float | None
    eval_max: float | None
    reward_first: float | None
    reward_last: float | None
    seconds: float
    start_seconds: float
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    tokens_per_second: float = 0.0
    stood_still_seconds: float = 0.0
    generated_again: int = 0
    effective_time_ratio: float = 1.0
    effective_time_ratio_replay_lost: float = 1.0


def summarize(
    rows: Sequence[Row], run: str, uri: str, outcome: str, start_seconds: float = 0.0, attempt: int = 0
) -> Summary:
    """The summary of ``rows`` (from ``sinks.read_rows``) at the end of ``attempt``, which may have written none. Pure."""
    scores = _values(rows, names.EVALUATION_SCORE)
    rewards = _values(rows, names.REWARD)
    by_stage = {stage: sum(_values(rows, names.seconds(stage))) for stage in (*names.STAGES, "evaluate")}
    seconds = sum(_values(rows, names.SECONDS_STEP)) + by_stage["evaluate"]
    training = seconds - by_stage["evaluate"]
    tokens = int(sum(_values(rows, names.TOKENS)))
    still, replayed = (sum(_values(rows, name)) for name in (names.SECONDS_STOOD_STILL, names.SECONDS_REPLAYED))
    return Summary(
        run=run,
        uri=uri,
        outcome=outcome,
        steps=max((row["step"] for row in rows), default=0),
        attempts=max([attempt, *(row["attempt"] for row in rows)]),
        eval_before=scores[0] if scores and rows[0].get(names.EVALUATION_SCORE) is not None else None,
        eval_after=scores[-1] if scores else None,
        eval_max=max(scores, default=None),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        seconds=round(seconds, 3),
        start_seconds=round(start_seconds, 3),
        seconds_by_stage={stage: round(spent, 3) for stage, spent in by_stage.items()},
        tokens=tokens,
        tokens_per_second=round(tokens / training, 1) if training > 0 else 0.0,
        stood_still_seconds=round(still, 3),
        generated_again=int(sum(_values(rows, names.GENERATED_AGAIN))),
        effective_time_ratio=round(effective_ratio(seconds, still - replayed), 4),
        effective_time_ratio_replay_lost=round(effective_ratio(seconds, still), 4),
    )


def write_summary(folder: Path, summary: Summary) -> Path:
    path = folder / FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def read_summary(folder: Path) -> Summary | None:
    """The summary in ``folder``; None if no attempt has ended there."""
    path = folder / FILE
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Summary(**data)


def render_summary(summary: Summary, folder: Path) -> RenderableType:
    """For the end of ``linckia train`` and for ``linckia status``. ``folder``: the run's local folder."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("held-out score", _scores(summary))
    table.add_row("training reward", f"{_number(summary.reward_first)} -> {_number(summary.reward_last)}")
    table.add_row("steps", f"{summary.steps} in {duration(summary.seconds)}, attempt {summary.attempts}")
    table.add_row("speed", f"{summary.tokens:,} tokens, {summary.tokens_per_second:,.0f} tokens/s")
    table.add_row("time by stage", _stages(summary))
    if summary.stood_still_seconds or summary.generated_again:
        table.add_row("recoveries", _recoveries(summary))
    if (curves := folder / "curves.png").exists():
        table.add_row("curves", str(_from_here(curves)))
    commands = Text()
    for command, meaning in next_commands(summary, folder):  # one below the other: side by side takes a wide terminal
        commands.append(f"  {command}\n", style="cyan").append(f"      {meaning}\n", style="dim")
    commands.right_crop()
    color = {"finished": "green", "stopped": "yellow"}.get(summary.outcome, "red")
    title = f"{summary.run}: {summary.outcome}"
    return Group(Panel(table, title=title, border_style=color, expand=False), "Try next:", commands)


def next_commands(summary: Summary, folder: Path) -> list[tuple[str, str]]:
    """(command, what it shows) worth typing after this run."""
    run = summary.run
    return [
        (f"linckia samples {run} --step {max(summary.steps, 1)}", "prompts, answers and rewards of the last step"),
        (f"linckia checkpoints {run}", "what was saved"),
        (f"linckia checkpoints export {run} --to model", "a Hugging Face folder of the newest checkpoint"),
        (f"tensorboard --logdir {_from_here(folder)}", "every metric"),
    ]


def _from_here(path: Path) -> Path:
    """As a person would type it in the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def duration(seconds: float) -> str:
    """Such as 48s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def _scores(summary: Summary) -> str:
    if summary.eval_after is None:
        return "no held-out data"
    before, after, best = (_number(v) for v in (summary.eval_before, summary.eval_after, summary.eval_max))
    return f"{before} -> {after} (best {best})"


def _recoveries(summary: Summary) -> str:
    return (
        f"{duration(summary.stood_still_seconds)} waited for lost groups, {summary.generated_again} answers generated again; "
        f"{summary.effective_time_ratio:.1%} effective time ({summary.effective_time_ratio_replay_lost:.1%} without replay)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _stages(summary: Summary) -> str:
    total = sum(summary.seconds_by_stage.values()) or 1.0
    parts = sorted(summary.seconds_by_stage.items(), key=lambda item: -item[1])
    return ", ".join(f"{stage} {spent / total:.0%}" for stage, spent in parts if spent / total >= 0.005) or "-"
