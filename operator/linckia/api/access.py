"""How a caller finds and reaches a run's control API: its token, and ``run.json`` in the run's local folder."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from linckia.api.names import TOKEN_VARIABLE

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunFile:
    """``runs/NAME/run.json``: where a run lasts and, while it lives, where it answers. Written anew by each attempt.

    Example: ``RunFile("sort-seed1", "s3://runs/sort-seed1", "127.0.0.1:8470", 4711, "node-0", 2, "/sort.yaml", 1.7e9)``
    """

    name: str
    uri: str
    api_address: str
    pid: int
    host: str
    attempt: int
    config_path: str
    started: float


def write_run_file(folder: Path, run: RunFile) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{RUN_FILE}.{os.getpid()}.partial"
    partial.write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / RUN_FILE)


def read_run_file(folder: Path) -> RunFile | None:
    """None where there is none, or where it is not one of ours."""
    try:
        data = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return RunFile(**data)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, TypeError):
        return None


def token_path(run: str) -> Path:
    return Path.home() / ".config" / "linckia" / f"{run}.token"


def find_token(run: str) -> str | None:
    """The token to call a run with: ``LINCKIA_TOKEN``, or the one its controller kept; None if there is neither."""
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    path = token_path(run)
    return path.read_text().strip() if path.is_file() else None
