"""From what a person types for RUN, a local name, a folder or a URI, to where that run is."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linckia.api.access import RunFile, read_run_file
from linckia.api.errors import UserError

RUNS = Path("runs")


@dataclass(frozen=True)
class RunPlace:
    """A run as found. ``folder``: its local folder, if there is one here. ``file``: what its last attempt wrote there."""

    name: str
    uri: str
    options: dict[str, Any]
    folder: Path | None
    file: RunFile | None


def find_run(run: str) -> RunPlace:
    """Where RUN is. Raises UserError, with the nearest name, if there is no such run."""
    if "://" in run:
        return _at_uri(run.rstrip("/"))
    for folder in (RUNS / run, Path(run).expanduser()):
        if (file := read_run_file(folder)) is not None:
            moved = "://" not in file.uri and not Path(file.uri).exists() and (folder / "log").is_dir()
            return RunPlace(file.name, str(folder.absolute()) if moved else file.uri, file.options, folder, file)
        if (folder / "attempts").is_dir():  # a run directory without the local folder of its run
            return RunPlace(folder.absolute().name, str(folder.absolute()), {}, folder, None)
    names = [place.name for place in list_runs()]
    close = difflib.get_close_matches(run, names, n=1)
    hint = f"the nearest in {RUNS}/ is {close[0]}" if close else f"{RUNS}/ holds {', '.join(names) or 'no run'}"
    raise UserError("RUN", run, f"there is no such run; {hint}", "give a name from `linckia status`, a folder or a URI")


def list_runs() -> list[RunPlace]:
    """The runs with a folder in ``./runs``, the latest started first."""
    found = []
    for folder in sorted(RUNS.iterdir()) if RUNS.is_dir() else []:
        if (file := read_run_file(folder)) is not None:
            found.append((file.started, RunPlace(folder.name, file.uri, file.options, folder, file)))
    return [place for _, place in sorted(found, key=lambda item: -item[0])]


def _at_uri(uri: str) -> RunPlace:
    name = uri.rpartition("/")[2]
    file = read_run_file(RUNS / name)
    if file is not None and file.uri.rstrip("/") == uri:
        return RunPlace(file.name, file.uri, file.options, RUNS / name, file)
    return RunPlace(name, uri, {}, None, None)
