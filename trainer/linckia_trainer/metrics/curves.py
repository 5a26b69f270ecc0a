"""Metric rows as one picture: what a person looks at first to see whether a run learns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linckia_trainer.metrics import names
from linckia_trainer.metrics.sinks import Row

FILE = "curves.png"
_COLORS = ("#1f6f8b", "#e07a5f", "#3d405b", "#81b29a", "#f2cc8f", "#9d4edd", "#adb5bd")


def draw_curves(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG with six panels: reward, held-out score, KL, entropy and log-probs, lengths, seconds.

    ``rows``: from ``sinks.read_rows``. Takes about two seconds, most of it the first import of matplotlib.
    """
    # no pyplot: it keeps figures and looks for a screen
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    panels = figure.subplots(2, 3)
    _lines(panels[0][0], "Training reward", "reward", [(names.REWARD, "mean", rows)])
    _band(panels[0][0], rows)
    _held_out(panels[0][1], rows)
    _lines(panels[0][2], "KL to the reference", "nats per token", [(names.KL, "k1 estimate", rows)])
    _lines(panels[1][0], "Entropy, and engine against trainer", "nats per token", [(names.ENTROPY, "entropy", rows)])
    _difference(panels[1][0], rows)
    _lines(
        panels[1][1],
        "Lengths",
        "tokens",
        [(names.ANSWER_TOKENS, "answer", rows), (names.PROMPT_TOKENS, "prompt", rows)],
    )
    _stages(panels[1][2], rows)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    partial.replace(path)


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, where rows have it."""
    found = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average without the pull to 0 at the start (Adam's bias correction)."""
    average, seen, result = 0.0, 0.0, []
    for value in values:
        average, seen = weight * average + (1 - weight) * value, weight * seen + (1 - weight)
        result.append(average / seen)
    return result


def _lines(axes: Any, title: str, unit: str, lines: Sequence[tuple[str, str, Sequence[Row]]]) -> None:
    _dress(axes, title, unit)
    drawn = 0
    for color, (name, label, rows) in zip(_COLORS, lines, strict=False):
        steps, values = series(rows, name)
        if not steps:
            continue
        drawn += 1
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
    _legend(axes, drawn)


def _band(axes: Any, rows: Sequence[Row]) -> None:
    steps, means = series(rows, names.REWARD)
    spread_steps, spreads = series(rows, "reward/std")
    if steps and steps == spread_steps:
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(steps, low, high, color=_COLORS[0], alpha=0.1, linewidth=0, label="standard deviation")
        axes.legend(frameon=False, fontsize=9)


def _difference(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = series(rows, names.LOG_PROB_DIFFERENCE)
    if steps:
        right = axes.twinx()  # it is smaller than the entropy by orders of magnitude
        right.plot(steps, values, color=_COLORS[1], linewidth=1.5)
        right.set_ylim(0, max(values) * 1.25 or 1.0)
        right.set_ylabel("|engine - trainer| log-probability", color=_COLORS[1])
        right.tick_params(colors=_COLORS[1])
        right.spines[["top", "left"]].set_visible(False)


def _held_out(axes: Any, rows: Sequence[Row]) -> None:
    _dress(axes, "Held-out score", "score")
    steps, values = series(rows, names.EVALUATION_SCORE)
    if steps:
        axes.plot(steps, values, color=_COLORS[1], linewidth=2, marker="o", markersize=5, label="sampled")
        for index in {0, len(steps) - 1}:
            axes.annotate(f"{values[index]:.2f}", (steps[index], values[index]), (0, 8), textcoords="offset points")
        axes.margins(y=0.15)
    _legend(axes, len(steps))


def _stages(axes: Any, rows: Sequence[Row]) -> None:
    _dress(axes, "Where the time goes", "seconds per step")
    timed = [row for row in rows if row.get(names.SECONDS_STEP) is not None]
    if timed:
        steps = [row["step"] for row in timed]
        stages = [[float(row.get(names.seconds(stage)) or 0.0) for row in timed] for stage in names.STAGES]
        axes.stackplot(steps, stages, labels=names.STAGES, colors=_COLORS, alpha=0.85)
        axes.margins(y=0.25)
        axes.legend(frameon=True, fontsize=9, ncols=3, loc="upper center")
    else:
        _legend(axes, 0)


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Any, drawn: int) -> None:
    if drawn:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", va="center", transform=axes.transAxes, color="#999999")
