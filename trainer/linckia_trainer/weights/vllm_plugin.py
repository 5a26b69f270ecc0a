"""The engine's side of weight transfer on CPU, inside vLLM's weight transfer framework.

vLLM finds ``register`` through the entry point group ``vllm.general_plugins``.
"""

BACKEND = "gloo"


def register() -> None:
    """Make the backend ``gloo`` known to vLLM; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__ + "_engine", "GlooWeightTransferEngine")
