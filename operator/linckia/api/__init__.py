"""The contract between the control plane and the data plane.

``config``: the run config. ``plan``: where its actors go. ``names``: every name and label.
``errors``: what a user is told.
"""
