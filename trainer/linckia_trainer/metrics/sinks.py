"""Where metric rows go, and reading them back.

``metrics.jsonl`` is the source: rows ``{step, attempt, time, name: number...}``, only ever appended. A step may have
several rows: training, evaluation, and all again when a later attempt replays it. Readers take the last value of each
name. TensorBoard and W&B get the same rows.
"""

import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.metrics.names import unknown

FILE = "metrics.jsonl"
Row = dict[str, Any]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes each row once, finite numbers only."""

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(config: RunConfig) -> None:
    """UserError if a sink that the config asks for cannot be had. Call before anything starts."""
    project = config.metrics.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "metrics.wandb_project",
            project,
            "the package wandb is not installed",
            "pip install wandb, or leave metrics.wandb_project out",
        )


class Metrics:
    """Writes rows of one attempt to every sink. A sink that fails with OSError, such as a full disk, is said once and
    the run goes on: metrics are no reason to lose a step.

    Example: ``Metrics(Path("runs/sort-seed1"), config, attempt=2).log(3, {"reward/mean": 0.4})``
    """

    def __init__(self, folder: Path, config: RunConfig, attempt: int, clock: Callable[[], float] = time.time) -> None:
        check_sinks(config)
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._sinks: list[Sink] = [_Jsonl(folder / FILE, attempt)]
        if config.metrics.tensorboard:
            self._sinks.append(_TensorBoard(folder / "tensorboard"))
        if config.metrics.wandb_project is not None:
            self._sinks.append(_Wandb(folder, config, config.metrics.wandb_project))
        self._said: set[Sink] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row. ValueError for a name that ``metrics.names`` does not hold."""
        if names := unknown(values):
            raise ValueError(f"metrics without an entry in metrics.names: {names}")
        now = self._clock()
        for sink in self._sinks:
            try:
                sink.write(step, now, values)
            except OSError as error:
                if sink not in self._said:
                    logger.warning("metrics are not written: %s", error)
                self._said.add(sink)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_rows(folder: Path) -> list[Row]:
    """One row per step, in order: of each name the value written last, by the highest attempt. [] without a file.

    A line cut off by a crash counts for nothing.
    """
    path = folder / FILE
    if not path.exists():
        return []
    rows: dict[int, Row] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when its writer was killed; the step's replay writes it again
        if "rewound_to" in row:
            rows = {step: old for step, old in rows.items() if step <= row["rewound_to"]}
            continue
        known = rows.setdefault(row["step"], {"attempt": 0})
        if row["attempt"] >= known["attempt"]:
            known.update(row)
        else:  # a stopped attempt that came back for a moment: it may add, not replace
            rows[row["step"]] = {**row, **known}
    return [rows[step] for step in sorted(rows)]


def mark_rewind(folder: Path, step: int) -> None:
    """Rows of later steps no longer count: the run was taken back to ``step``."""
    if (folder / FILE).exists():
        _append(folder / FILE, {"rewound_to": step})


def _append(path: Path, row: Row) -> None:
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")  # after a line that a crash cut off
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: what is not finite becomes null."""
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


class _Jsonl:
    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        _append(self._path, {"step": step, "attempt": self._attempt, "time": now, **_finite(values)})

    def close(self) -> None:
        pass


class _TensorBoard:
    """Event files without torch or TensorFlow. An attempt's first row starts a session at its step, so that TensorBoard
    drops what earlier attempts wrote from there on."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # a second to import

        self._writer = EventFileWriter(str(folder), flush_secs=10)
        self._started = False

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._started:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=step, session_log=start))
            self._started = True
        parts = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=parts)))

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, config: RunConfig, project: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=config.run.name,
            id=config.run.name,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json", exclude={"storage": {"options"}}),  # options may hold secrets
        )

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
