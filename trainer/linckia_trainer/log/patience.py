"""Waiting for a storage that fails for a while: bounded, said, and each time a little longer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

RUN_SECONDS = 300.0  # a server that restarts, a network that is mended, a mount that comes back
NOTE_SECONDS = 5.0  # for what is good to have, while somebody waits for more important things
FIRST_WAIT = 0.5  # seconds
LONGEST_WAIT = 20.0


def _nobody(text: str) -> None:
    """Where nobody listens."""


@dataclass(frozen=True)
class Patience:
    """How many ``seconds`` of failure are waited out, 0: none; ``say`` hears of it, once for each failure waited for."""

    seconds: float = 0.0
    say: Callable[[str], None] = _nobody
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def patiently(ask: Callable[[], Result], passing: Callable[[Exception], bool], patience: Patience, name: str) -> Result:
    """``ask()``; again, while it fails with an error that may be ``passing``, until ``patience`` is at its end.

    Then the last error is raised. ``name`` is what fails, for the message.
    """
    began: float | None = None
    wait = FIRST_WAIT
    while True:
        try:
            return ask()
        except Exception as error:
            if not passing(error):
                raise
            now = patience.now()
            if began is None and patience.seconds > 0:
                patience.say(f"{name} fails ({error}); it is asked again for up to {patience.seconds:.0f} s")
            began = now if began is None else began
            left = began + patience.seconds - now
            if left <= 0:
                raise
            patience.sleep(min(wait, left))
            wait = min(2 * wait, LONGEST_WAIT)
