"""How the world talks to a live run. No torch here.

- ``server``     the control API: what the run does, and what it can be asked for
- ``page.html``  the live page it serves at ``/``
- ``token``      the secret that guards it
"""
