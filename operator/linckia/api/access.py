"""How a command finds and reaches a run: ``run.json`` in the run's local folder, and its control API's token."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from linckia.api.names import TOKEN_VARIABLE

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunFile:
    """``runs/NAME/run.json``: where a run lasts and, while it lives, where it answers. Written anew by each attempt.

    ``options`` are ``storage.options``, ``config`` the path of the config file, ``started`` seconds since 1970.

    Example: ``RunFile("sort-seed1", "s3://runs/sort-seed1", {}, 2, "127.0.0.1:8470", "node-0", 47, "a.yaml", 1e9)``
    """

    name: str
    uri: str
    options: dict[str, Any]
    attempt: int
    api_address: str
    host: str
    pid: int
    config: str
    started: float


def read_run_file(folder: Path) -> RunFile | None:
    """None where there is none, or where it is not one of ours."""
    try:
        data = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return RunFile(**{one.name: data[one.name] for one in fields(RunFile)})
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, TypeError, KeyError):
        return None


def token_path(run: str) -> Path:
    """Where the token of a run is kept for its own user."""
    return Path.home() / ".config" / "linckia" / f"{run}.token"


def find_token(run: str) -> str | None:
    """The token to call a run with: ``LINCKIA_TOKEN``, or the one its controller kept; None if there is neither."""
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    path = token_path(run)
    return path.read_text().strip() if path.is_file() else None
