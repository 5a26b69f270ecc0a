"""States: what stateful groups saved, in one format over any number of tiers. The modules here need no torch.

- ``format``      the bytes of one rank's state
- ``tiers``       the places states are kept, and what is in them
- ``choose``      the only recovery rule: which state a group restores
- ``retention``   which states and records may go
- ``rewind``      moves what came after a step aside
- ``aside``       moves a whole run aside
- ``fork``        a new run from another one's newest checkpoint
"""
