"""The secret that the control API asks for: ``LINCKIA_TOKEN``, or a file that only its owner reads."""

import os
import secrets

from linckia.api.access import token_path
from linckia.api.errors import UserError
from linckia.api.names import TOKEN_VARIABLE


def run_token(run: str) -> str:
    """The run's token, made at its first start. UserError if there is no place to keep it."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    path = token_path(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(24))
        return path.read_text().strip()
    except OSError as error:
        reason = f"{path} cannot be used: {error.strerror}"
        raise UserError(TOKEN_VARIABLE, None, reason, f"set {TOKEN_VARIABLE} to a secret of your own") from error
