"""One task per run: however many events come, a run is reconciled once at a time, soon after the first of them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from linckia.kube import metrics

COLLAPSE_SECONDS = 0.2  # events that come so close together are one
FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 30.0

log = logging.getLogger("linckia.operator")


class Runner:
    """``reconcile`` runs in ``pool``; it returns the seconds until it wants to run again, or None when the run is gone."""

    def __init__(self, reconcile: Callable[[str], float | None], pool: Executor) -> None:
        self.reconcile = reconcile
        self.pool = pool
        self.wakes: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def wake(self, runs: Iterable[str]) -> None:
        """Reconcile these soon. Called in the event loop."""
        for run in runs:
            if run not in self.tasks:
                self.wakes[run] = asyncio.Event()
                self.tasks[run] = asyncio.get_running_loop().create_task(self._look_after(run), name=f"run {run}")
                metrics.RUNS.set(len(self.tasks))
            self.wakes[run].set()

    async def close(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _look_after(self, run: str) -> None:
        wake, failures = self.wakes[run], 0
        try:
            while True:
                wake.clear()
                pause, failures = await self._once(run, failures)
                if pause is None:
                    if not wake.is_set():  # nothing has come for it meanwhile: no await between this and the end
                        return
                    continue
                await self._pause(wake, pause)
        finally:
            self.tasks.pop(run, None)
            self.wakes.pop(run, None)
            metrics.RUNS.set(len(self.tasks))

    async def _once(self, run: str, failures: int) -> tuple[float | None, int]:
        """(seconds until the next time, failures in a row)."""
        began = time.monotonic()
        try:
            pause = await asyncio.get_running_loop().run_in_executor(self.pool, self.reconcile, run)
        except Exception as error:  # one run's trouble must end no other's task, nor its own
            metrics.RECONCILES.labels("failed").inc()
            log.warning("%s: reconcile failed: %s: %s", run, type(error).__name__, error, exc_info=failures == 0)
            return min(FIRST_RETRY_SECONDS * 2**failures, LONGEST_RETRY_SECONDS), min(failures + 1, 8)
        finally:
            metrics.RECONCILE_SECONDS.observe(time.monotonic() - began)
        metrics.RECONCILES.labels("done").inc()
        return pause, 0

    async def _pause(self, wake: asyncio.Event, seconds: float) -> None:
        try:
            await asyncio.wait_for(wake.wait(), seconds)
            await asyncio.sleep(COLLAPSE_SECONDS)
        except TimeoutError:
            return
