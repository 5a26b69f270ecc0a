"""What to do about what was seen: pure functions of (observation, history, policy, now); no clock, no input, no output.

- ``budget``      how often a group may be restarted, after what wait, and when the run stops instead
"""
