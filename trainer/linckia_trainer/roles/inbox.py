"""Calls for the one thread that may touch an engine: it carries them out between two of its steps, in their order."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Inbox:
    """What other threads want done. A lock around each step would do, were it fair: its owner takes it again at once,
    and whoever waits for it waits for the whole generation."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def ask(self, call: Callable[[], T]) -> T:
        """From any other thread: have ``call`` carried out; returns its result or raises its error."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        return done.result()

    def serve(self, wait: bool) -> None:
        """From the owner: carry out all that has been asked for; with ``wait`` until something is."""
        while wait or not self._calls.empty():
            call, done = self._calls.get()
            wait = False
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                done.set_exception(error)
