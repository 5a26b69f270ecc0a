"""The secret that the control API asks for: ``LINCKIA_TOKEN``, or a file that only its owner reads."""

import os
import secrets
from pathlib import Path

from linckia.api.names import TOKEN_VARIABLE


def token_file(run: str) -> Path:
    return Path.home() / ".config" / "linckia" / f"{run}.token"


def run_token(run: str) -> str:
    """The run's token, made at its first start."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    path = token_file(run)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(24))
    return path.read_text().strip()
