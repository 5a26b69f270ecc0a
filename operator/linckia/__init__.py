"""Linckia's control plane: light, importable without torch, ray or vllm.

Rooms: ``api`` (the contract: config, placement plan, names, errors), ``observe`` (what can be seen of a run from outside),
``decide`` (what to do about it: pure functions) and ``cli`` (the ``linckia`` command).
"""
