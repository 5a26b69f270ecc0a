"""Rewards from Python functions and verifiers: loading them, calling them, and naming the sample that fails."""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import ReasoningGym
from linckia.api.errors import UserError
from linckia_trainer.experience.prompts import open_task

RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float | Mapping[str, float]]]
"""``reward(prompts, answers, examples)``: for each sample a number, or named parts such as ``{"format": 1, "exact": 0}``."""

Fingerprint = tuple[str, str, str, str]
"""(role, stage, exception type, innermost user frame): the same failure has the same one in every attempt."""


class RewardError(UserError):
    """A reward that cannot be used. ``fingerprint`` says whether it is the same failure as another one."""

    fingerprint: Fingerprint = ("reward", "score", "", "")

    def with_fingerprint(self, kind: str, frame: str) -> "RewardError":
        self.fingerprint = ("reward", "score", kind, frame)  # in __dict__, so that it pickles
        return self


@dataclass(frozen=True)
class Scores:
    """``rewards`` float32 [N] = sum of weight x part; ``parts`` float32 [N, P] as the function gave them; ``names`` of the P parts.

    A function that returns plain numbers has no parts: P = 0.
    """

    rewards: NDArray[np.float32]
    parts: NDArray[np.float32]
    names: list[str]


def load_function(spec: str, field: str = "reward.function") -> Callable[..., Any]:
    """The function that ``path/to/file.py:name`` names. The file's folder is importable from it, as in a script.

    Raises UserError naming ``field`` when the file or the name is missing or the file fails to import (with the line).
    """
    path_text, _, name = spec.rpartition(":")
    if not path_text or not name.isidentifier():
        raise UserError(field, spec, "does not name a function", "write file.py:function")
    path = Path(path_text).resolve()
    if not path.is_file():
        raise UserError(field, spec, f"no such file: {path}", "give the file's path from where you start the run")
    module_name = f"linckia_user_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(field, spec, "is no Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        line = error.lineno if isinstance(error, SyntaxError) else _line_in(error.__traceback__, path)
        reason = f"importing it fails at {path.name}:{line}: {type(error).__name__}: {error}"
        raise UserError(field, spec, reason, "correct the file; python FILE shows the whole error") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(field, spec, f"{path.name} has no function {name!r}", f"choose one of {', '.join(functions)}")
    loaded: Callable[..., Any] = function
    return loaded


def verifier(task: ReasoningGym) -> RewardFunction:
    """A task's own verifier as a reward function: a number in [0, 1] for each answer.

    What stands in the last ``<answer>...</answer>`` counts where there is one, else the whole answer; white space around it does not.
    """
    dataset = open_task(task.model_copy(update={"size": 1}), "data.train.reasoning_gym")
    from reasoning_gym.utils import extract_answer

    def verify(prompts: list[str], answers: list[str], examples: list[dict[str, Any]]) -> list[float]:
        found = [extract_answer(answer) for answer in answers]
        given = [answer.strip() if tagged is None else tagged for answer, tagged in zip(answers, found, strict=True)]
        return [float(dataset.score_answer(answer, entry)) for answer, entry in zip(given, examples, strict=True)]

    return verify


def score(
    function: RewardFunction,
    prompts: Sequence[str],
    answers: Sequence[str],
    examples: Sequence[dict[str, Any]],
    weights: Mapping[str, float],
    keys: Sequence[tuple[int, int]] | None = None,
) -> Scores:
    """Call a reward function on N samples and check what it returns.

    ``weights`` are those of named parts, 1 where none is given. ``keys`` are the samples' (position, sample), to name them in errors.

    Raises RewardError when the function raises, returns the wrong number of values, a value that is no finite number
    or named parts that differ between samples, or when ``weights`` names a part that does not exist.
    """
    samples = _Samples(function, list(prompts), list(answers), list(examples), keys)
    values = samples.call()
    first = values[0]
    if not isinstance(first, Mapping):
        return Scores(
            np.array([samples.number(i, v) for i, v in enumerate(values)], np.float32),
            np.zeros((len(values), 0), np.float32),
            [],
        )
    names = sorted(first)
    if unknown := sorted(set(weights) - set(names)):
        raise samples.error(
            0, "weights", f"reward.weights names {unknown}, but the parts are {names}", "correct reward.weights"
        )
    table = np.zeros((len(values), len(names)), dtype=np.float64)
    for i, value in enumerate(values):
        if not isinstance(value, Mapping) or sorted(value) != names:
            parts = sorted(value) if isinstance(value, Mapping) else "a plain number"
            raise samples.error(
                i, "parts", f"returned {parts}, the first sample {names}", "return the same parts for every sample"
            )
        table[i] = [samples.number(i, value[name], name) for name in names]
    totals = table @ np.array([weights.get(name, 1.0) for name in names])
    return Scores(totals.astype(np.float32), table.astype(np.float32), names)


@dataclass(frozen=True)
class _Samples:
    """The samples of one call, to call the function on them and to name one in an error."""

    function: RewardFunction
    prompts: list[str]
    answers: list[str]
    examples: list[dict[str, Any]]
    keys: Sequence[tuple[int, int]] | None

    def call(self) -> list[Any]:
        try:
            values = self.function(self.prompts, self.answers, self.examples)
        except MemoryError:
            raise  # the member's need, whoever asked for the last bytes: it is lost, and one with memory takes its place
        except Exception as error:
            culprit, error = self._culprit(error)
            frame = _user_frame(error.__traceback__)
            reason = f"raised {type(error).__name__}: {error} (at {frame})"
            raise self.error(culprit, type(error).__name__, reason, "correct the function", frame) from error
        if (
            isinstance(values, str | bytes | Mapping)
            or not hasattr(values, "__len__")
            or not hasattr(values, "__iter__")
        ):
            reason = f"returned {type(values).__name__}, not a list"
            raise self.error(None, "type", reason, "return a list with one value for each answer")
        if len(values) != len(self.answers):
            reason = f"returned {len(values)} values for {len(self.answers)} answers"
            raise self.error(None, "length", reason, "return one value for each answer, in their order")
        return list(values)

    def _culprit(self, error: Exception) -> tuple[int | None, Exception]:
        """The first sample that fails when called alone; none if only the whole batch fails."""
        for i in range(len(self.answers)):
            try:
                self.function(self.prompts[i : i + 1], self.answers[i : i + 1], self.examples[i : i + 1])
            except Exception as alone:  # noqa: BLE001 - whatever the user's code raises is what we look for
                return i, alone
        return None, error

    def number(self, i: int, value: Any, part: str | None = None) -> float:
        what = "returned" if part is None else f"part {part!r} is"
        if not isinstance(value, Real | np.bool_):
            raise self.error(
                i, "type", f"{what} {value!r}, which is no number", "return a number, or a dict of numbers"
            )
        if not math.isfinite(value):
            raise self.error(i, "finite", f"{what} {value!r}", "return a finite number")
        return float(value)

    def error(self, i: int | None, kind: str, reason: str, next_step: str, frame: str | None = None) -> RewardError:
        if i is not None:
            key = "" if self.keys is None else "position {}, sample {}, ".format(*self.keys[i])
            reason = f"on {key}prompt {_shorten(self.prompts[i])}, answer {_shorten(self.answers[i])}: {reason}"
        name = getattr(self.function, "__name__", repr(self.function))
        code = getattr(self.function, "__code__", None)
        where = frame or (f"{Path(code.co_filename).name}:{code.co_firstlineno} in {name}" if code else name)
        return RewardError("reward", name, reason, next_step).with_fingerprint(kind, where)


def _shorten(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[: width - 3] + "...")


def _line_in(trace: TracebackType | None, path: Path) -> int | str:
    """The line of ``path`` that was running, the innermost one."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] else "?"


def _user_frame(trace: TracebackType | None) -> str:
    """The innermost frame outside this module and installed packages, as ``file.py:12 in name``."""
    frames = traceback.extract_tb(trace)
    own = [
        f
        for f in frames
        if f.filename != __file__ and "site-packages" not in f.filename and "/lib/python" not in f.filename
    ]
    chosen = (own or frames)[-1]
    return f"{Path(chosen.filename).name}:{chosen.lineno} in {chosen.name}"
