"""Errors of the trained groups that the controller knows, importable without torch."""


class NonFiniteError(RuntimeError):
    """Loss or gradients are not finite on some rank; every rank raises it before the optimizer step."""


class EnginesLostError(ConnectionError):
    """Rollout engines were lost during a weight transfer; the policy that says so is whole, and so are the others."""
