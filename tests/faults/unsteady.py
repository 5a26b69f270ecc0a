"""A filesystem that is slow or fails while a file says so; the tests install it for a run as a user would his own.

``storage.options.switch`` names the file, JSON ``{"slow": seconds, "fail": "", "all" or "some", "below": [folder names]}``.
With "some", each process's every third write fails, and of its reads and listings one in a hundred: a listing is many calls,
one for each folder and object, and is asked again as a whole. What it does is appended to ``struck.txt`` beside it: the witness.
"""

import errno
import itertools
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

EVERY = {"write": 3, "read": 100, "list": 100}  # with "some", one call of so many fails


class UnsteadyFileSystem(LocalFileSystem):
    """Files of this machine, each written whole or not at all."""

    protocol = "unsteady"

    def __init__(self, switch: str, **settings: Any) -> None:
        super().__init__(auto_mkdir=True, **settings)
        self.switch = Path(switch)
        self.calls = {call: itertools.count(1) for call in EVERY}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """A write that fails has been done: its answer is what is lost."""
        goal, aside = Path(self._strip_protocol(path)), self.switch.with_name(f"aside-{uuid.uuid4().hex}")
        fails = self._weather("write", path)
        aside.write_bytes(value)
        goal.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(aside, goal) if mode == "create" else os.replace(aside, goal)
        finally:
            aside.unlink(missing_ok=True)
        self._fail(fails)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._fail(self._weather("read", path))
        return Path(self._strip_protocol(path)).read_bytes()[start:end]

    def ls(self, path: str, detail: bool = False, **settings: Any) -> Any:
        self._fail(self._weather("list", path))
        return super().ls(path, detail, **settings)

    def _weather(self, call: str, path: str) -> bool:
        """Be slow, if so; whether to fail."""
        try:
            weather = json.loads(self.switch.read_text())
        except FileNotFoundError:
            return False
        if not any(f"/{folder}/" in f"{path}/" for folder in weather["below"]):
            return False
        fails = weather["fail"] == "all" or (weather["fail"] == "some" and next(self.calls[call]) % EVERY[call] == 0)
        if fails or weather["slow"]:
            with self.switch.with_name("struck.txt").open("a") as witness:
                witness.write(f"{'failed' if fails else 'slowed'} {call} {path}\n")
        time.sleep(weather["slow"])
        return fails

    def _fail(self, fails: bool) -> None:
        if fails:
            raise OSError(errno.EIO, "the storage does not answer")


def install(folder: Path) -> None:
    """Make ``folder`` one that, in PYTHONPATH, makes fsspec know ``unsteady://``."""
    about = folder / "unsteady-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: unsteady\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nunsteady = unsteady:UnsteadyFileSystem\n")
    (folder / "unsteady.py").write_text(Path(__file__).read_text())
