"""Faults put into a live run from outside the code that has to survive them.

``inject``: the faults themselves, by pid and by file; ``aim``: which process or file a target's name means; ``trial``: wait
for the moment, strike, wait until it is healed, and judge.
"""
