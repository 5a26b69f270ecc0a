"""How a running controller is seen and steered: the control API (``server``) and its token (``token``)."""
