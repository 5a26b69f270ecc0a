"""A run config and the files it names as one text, so that a job can carry them to every node in its environment.

A bundle is a small folder: unpacked it lies at the same path on every node, which follows from what it holds alone. Whoever
finds it there already uses it, and who finds a part of it missing or changed writes that part again.
"""

import base64
import binascii
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from linckia.api.errors import UserError
from linckia.api.names import BUNDLE_VARIABLE

# Source: execve(2), MAX_ARG_STRLEN: one string of an environment or a command line may have 131,072 bytes, and Ray puts a
# job's whole runtime environment into one; the half is left for what else stands there.
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Bundle:
    """Texts by their path in the folder; ``config`` is the path of the config among them.

    Example: ``Bundle("sort.yaml", {"sort.yaml": "run: {steps: 9}", "rewards/sort.py": "def reward(...): ..."})``
    """

    config: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def _json(self) -> str:
        return json.dumps({"config": self.config, "files": dict(sorted(self.files.items()))}, ensure_ascii=False)

    def pack(self) -> str:
        """The bundle as one line of letters. UserError if it is too large to travel so."""
        packed = base64.b64encode(gzip.compress(self._json().encode(), mtime=0)).decode()
        if len(packed) > MAX_BYTES:
            largest = max(self.files, key=lambda name: len(self.files[name]))
            raise UserError(
                largest,
                None,
                f"the config's files are {len(packed) // 1024} KiB packed and a job carries {MAX_BYTES // 1024} KiB; this is the "
                "largest of them",
                "put it on a volume that every pod mounts, or into the image, and give the absolute path that it has there",
            )
        return packed


def unpack(text: str) -> Bundle:
    """UserError for what ``Bundle.pack`` did not make, and for a path that leads out of the bundle's folder."""
    try:
        data = json.loads(gzip.decompress(base64.b64decode(text, validate=True)))
        bundle = Bundle(str(data["config"]), {str(name): str(held) for name, held in data["files"].items()})
    except (binascii.Error, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            BUNDLE_VARIABLE, None, f"is no bundle ({type(error).__name__}: {error})", "write it with `linckia render`"
        ) from None
    for name in (bundle.config, *bundle.files):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or bundle.config not in bundle.files:
            raise UserError(
                BUNDLE_VARIABLE, None, f"it holds no path such as {name!r}", "write it with `linckia render`"
            )
    return bundle


def unpack_here(environment: Mapping[str, str] = os.environ) -> tuple[Path, Path] | None:
    """(folder, config file) of the bundle in this process's environment, written to this machine; None without one."""
    text = environment.get(BUNDLE_VARIABLE)
    if not text:
        return None
    bundle = unpack(text)
    folder = Path(tempfile.gettempdir(), f"linckia-bundle-{bundle.digest}")
    for name, held in bundle.files.items():
        path = folder / name
        if path.is_file() and path.read_text(encoding="utf-8") == held:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as partial:
            partial.write(held)
        os.chmod(partial.name, 0o644)
        os.replace(partial.name, path)  # whole or not at all: another member of this node may read it now
    return folder, folder / bundle.config
