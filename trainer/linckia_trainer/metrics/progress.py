"""What a person watching sees: a live line on a terminal, one plain line per step anywhere else."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from linckia_trainer.metrics import names
from linckia_trainer.metrics.summary import duration

_SHOWN = (
    (names.REWARD, "reward", "{:.3f}"),
    (names.KL, "kl", "{:.4f}"),
    (names.TOKENS_PER_SECOND, "tokens/s", "{:,.0f}"),
)


class RunProgress:
    """A context manager around the loop. Every call is cheap and never fails the run.

    Example: ``with RunProgress("sort-seed1", 100) as seen: seen.stage(1, "generate"); seen.step(1, row)``
    """

    def __init__(
        self,
        run: str,
        total_steps: int,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=False, quiet=quiet)
        self._run, self._total = run, total_steps
        self._clock = clock
        self._ended: deque[tuple[int, float]] = deque(maxlen=11)  # (step, when): time left is from the last ten steps
        self._last: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("[bold]{task.fields[run]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[stage]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=total_steps, run=run, stage="starting", left="")
        self._numbers = Text()
        live = self._console.is_terminal and not quiet
        self._live = (
            Live(Group(self._bar, self._numbers), console=self._console, refresh_per_second=8) if live else None
        )

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """Something said once, such as ``starting 2 engines``."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, step: int, stage: str, done: int = 0, total: int = 0) -> None:
        """A stage began, or has come to ``done`` of ``total``."""
        share = f" {done}/{total}" if total else ""
        self._bar.update(self._task, completed=max(0, step - 1), stage=f"{stage}{share}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step ended with this metric row."""
        self._ended.append((step, self._clock()))
        self._last.update(values)
        left = self.time_left()
        left_words = f"{duration(left)} left" if left is not None else ""
        self._bar.update(self._task, completed=step, left=left_words)
        self._show()
        if self._live is None:
            self._console.print(
                f"step {step}/{self._total}  {self._words()}  {left_words}".rstrip(), highlight=False, soft_wrap=True
            )

    def evaluated(self, step: int, score: float, samples: int) -> None:
        """The held-out score after ``step`` (0: before training)."""
        self._last[names.EVALUATION_SCORE] = score
        self._show()
        self.message(f"held-out score after step {step}: {score:.3f} ({samples} answers)")

    def remember(self, score: float) -> None:
        """The last held-out score of an earlier attempt: it stands until the next one."""
        self._last[names.EVALUATION_SCORE] = score
        self._show()

    def time_left(self) -> float | None:
        """Seconds, from the pace of the last steps; None before two have ended."""
        if len(self._ended) < 2:
            return None
        (first, began), (last, ended) = self._ended[0], self._ended[-1]
        return (ended - began) / max(1, last - first) * max(0, self._total - last)

    def _show(self) -> None:
        self._numbers.plain = self._words()

    def _words(self) -> str:
        shown = [f"{label} {form.format(self._last[name])}" for name, label, form in _SHOWN if name in self._last]
        if names.SECONDS_STEP in self._last:
            shown.append(f"{self._last[names.SECONDS_STEP]:.2f} s/step")
        if names.EVALUATION_SCORE in self._last:
            shown.append(f"held-out {self._last[names.EVALUATION_SCORE]:.3f}")
        return "  ".join(shown)
