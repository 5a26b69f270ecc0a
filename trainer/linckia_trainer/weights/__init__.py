"""How the policy's weights reach the engines.

``buckets``: parameters packed into few flat pieces, the same way on both sides. ``gloo``: the trainer's side on CPU.
``vllm_plugin``: the engine's side, inside vLLM's weight transfer framework. ``sync``: the controller's part, which
keeps track of who is connected to whom and which weight version each engine serves.
"""
