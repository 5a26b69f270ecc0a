"""This host and this process, as other processes can tell them from any that come later."""

import os
import socket

from linckia.api.process import start_time as start_time


def this_host() -> str:
    return socket.gethostname()


def this_start_time() -> int:
    started = start_time(os.getpid())
    assert started is not None, "a running process is in /proc"
    return started
