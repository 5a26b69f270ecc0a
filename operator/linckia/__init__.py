"""Linckia's control plane: light, importable without torch, ray or vllm.

Rooms: ``api`` (the contract: config, placement plan, names, errors) and ``cli`` (the ``linckia`` command).
"""
