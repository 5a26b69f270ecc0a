"""Linckia's data plane: everything that runs inside the Ray cluster. Start reading at ``controller.py``."""
