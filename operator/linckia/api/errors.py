"""Errors a user can cause. Each names the field, the value, the reason and the next step."""


class UserError(Exception):
    """Something the user can put right. The command line prints it without a traceback and ends with ``exit_code``.

    Example: ``UserError("run.steps", 0, "must be at least 1", "set run.steps to the number of PPO steps")``
    """

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str, next_step: str) -> None:
        self.field = field
        self.value = value
        self.reason = reason
        self.next_step = next_step
        super().__init__(field, value, reason, next_step)  # all four, so that it pickles

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value!r}"
        return f"{self.field}{value}: {self.reason}. Next: {self.next_step}."


class DamagedError(UserError):
    """An object of the log or a state whose bytes are not what was written."""


class LiveRunError(UserError):
    """Another attempt of this run is alive."""


class FencedError(RuntimeError):
    """A newer attempt or generation has taken over; whoever sees this exits and touches nothing."""
