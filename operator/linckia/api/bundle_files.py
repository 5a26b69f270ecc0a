"""What a config needs beside itself, gathered into a bundle: the code, the Python files that code imports, and prompt files."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from linckia.api.bundle import Bundle
from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia.api.load import local_files, written_values

ELSEWHERE = "files"  # the bundle's folder for files from outside the current directory
CODE = ("model.make", "reward.function")
FOLDERS = ("model.path", "reward.model")


def gather(path: Path, overrides: Sequence[str], config: RunConfig, here: Path) -> tuple[Bundle, list[str]]:
    """The bundle of ``config``, as loaded from ``path`` and ``overrides``, and further overrides with which it finds its files.

    Files below ``here`` keep their place, so that the config says the right thing of them where the bundle's folder is the
    current directory. Others get a place in a folder of their own. What is not on this machine is left to the cluster.
    """
    written = written_values(path, overrides)
    config_name = _place(path, here)
    files, further = {config_name: _text(path, "CONFIG")}, []
    for key, value in local_files(config).items():
        file, colon, function = value.rpartition(":") if key in CODE else (value, "", "")
        found = Path(file)
        if key in FOLDERS:
            if found.is_dir() and not (key == "model.path" and config.model.make) and found.is_relative_to(here):
                raise UserError(
                    key, value, "is a folder of this machine, and too large to travel with a job",
                    "put it on a volume that every pod mounts and give its path there, or a hub name",
                )  # fmt: skip
            if not found.is_relative_to(here):
                continue
        elif found.is_file():
            files[_place(found, here)] = _text(found, key)
            for module in imported(found) if colon else ():
                files[_place(module, here)] = _text(module, key)
        else:
            continue
        if not (found.is_relative_to(here) and _keeps_its_place(written, key)):
            further.append(f"{key}={_place(found, here)}{colon}{function}")
    return Bundle(config_name, files), further


def _keeps_its_place(written: Any, key: str) -> bool:
    """Whether a path is written so that it means the same file from another current directory."""
    for part in key.split("."):
        written = written[part]
    return not written.startswith(("/", "~")) and ".." not in Path(written).parts


def imported(code: Path) -> set[Path]:
    """The Python files beside ``code`` that it imports, and those that they import: its folder is importable from it."""
    found: set[Path] = set()
    waiting = [code]
    while waiting:
        for name in _imports(waiting.pop()):
            for path in _module(code.parent, name):
                if path not in found and path != code:
                    found.add(path)
                    waiting.append(path)
    return found


def _imports(code: Path) -> Iterator[str]:
    try:
        tree = ast.parse(code.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(str(code), None, f"is not Python ({error})", "correct the file") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _module(folder: Path, dotted: str) -> list[Path]:
    """The file of a module in ``folder``, or all files of its package; nothing for what is installed."""
    name = dotted.partition(".")[0]
    file, package = folder / f"{name}.py", folder / name
    if file.is_file():
        return [file]
    return sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else []


def _place(path: Path, here: Path) -> str:
    path = path.absolute()
    inside = path.relative_to(here) if path.is_relative_to(here) and ".." not in path.parts else None
    return inside.as_posix() if inside is not None else f"{ELSEWHERE}/{path.parent.name}/{path.name}"


def _text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, str(path), f"cannot be read as text ({error})", "correct the path or the file") from None
