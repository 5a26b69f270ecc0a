"""What to do about what was seen: pure functions of (observation, policy, history, now); no clock, no input, no output.

- ``rules``       ``decide``: the table of rules, each from what was seen to what is done and why
- ``judge``       one watcher's memory between two looks, the only thing here that is not pure
- ``blame``       which of several groups that wait for each other is the one that does not go on
- ``limits``      how long a stage may stand still before it is called a hang
- ``history``     ``learn``: what a run has shown so far, in bounded memory
- ``pace``        who is slower than its peers, step after step
- ``statistics``  running statistics of times that span orders of magnitude
- ``budget``      how often a group may be restarted, after what wait, and when the run stops instead
- ``supervise``   whether a controller that ended is started again
"""
