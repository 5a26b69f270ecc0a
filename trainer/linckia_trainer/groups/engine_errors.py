"""Errors of the trained groups that the controller knows, importable without torch."""


class NonFiniteError(RuntimeError):
    """Loss or gradients are not finite on some rank; every rank raises it before the optimizer step."""
