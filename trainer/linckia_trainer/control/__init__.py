"""How the world talks to a live run. No torch here.

- ``server``     the control API: what the run does, and what it can be asked for
- ``page.html``  the live page it serves at ``/``
- ``token``      the secret that guards it
- ``watcher``    a thread that finds what is dead, hung or slow while no call fails
- ``gather``     what the watcher sees, asked of Ray
"""
