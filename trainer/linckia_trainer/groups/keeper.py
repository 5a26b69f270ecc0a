"""The keeper: on a cluster, frees what a run holds once nobody continues it.

Members outlive their controller so that the next one may adopt them. Those whom nobody calls exit by themselves, but their
placement groups would hold the devices for ever. A detached 0-CPU actor ``{run}/keeper`` holds a lease that the
controller renews; when it runs out, or is given back, the keeper removes all there is of the run, and exits.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from linckia.api.config import RunConfig
from linckia.api.errors import FencedError
from linckia.api.names import NAMESPACE, keeper_name
from linckia_trainer.groups import leftovers
from linckia_trainer.log.store import Store

HIRE_SECONDS = 120.0  # within which a keeper has to stand
TRY_AGAIN_SECONDS = 0.5


class Keeper:
    """Counts how long nobody has renewed the lease; only while it is awake, so that a machine's sleep ends no run."""

    def __init__(self, config: RunConfig, attempt: int) -> None:
        self.config = config
        self.attempt = attempt
        self.unheard = 0.0  # seconds
        self.lock = threading.Lock()  # held for good once it clears: whoever comes then hires another keeper
        threading.Thread(target=self._watch, daemon=True).start()

    def hire(self, config: RunConfig, attempt: int) -> None:
        """Keep the run for this attempt, with its config. FencedError if a newer one has hired it."""
        with self.lock:
            self._admit(attempt)
            self.config = config

    def renew(self, attempt: int) -> None:
        """The attempt continues the run."""
        with self.lock:
            self._admit(attempt)

    def release(self, attempt: int) -> None:
        """The attempt has ended: what is left of the run goes now. The keeper has to be killed afterwards."""
        with self.lock:
            self._admit(attempt)
            self._clear()

    def _admit(self, attempt: int) -> None:
        if attempt < self.attempt:
            raise FencedError(f"attempt {attempt} was replaced by attempt {self.attempt}")
        self.attempt = attempt
        self.unheard = 0.0

    def _watch(self) -> None:
        while True:
            interval = renewal_interval(self.config)
            time.sleep(interval)
            with self.lock:
                self.unheard += interval
                while self.unheard >= self.config.recovery.orphan_timeout:
                    try:
                        self._clear()
                        ray.kill(ray.get_actor(keeper_name(self.config.run.name), namespace=NAMESPACE))
                    except Exception as error:  # noqa: BLE001 - nobody else would free the devices: go on trying
                        print(f"the run cannot be cleared away: {error}", flush=True)
                    time.sleep(interval)

    def _clear(self) -> None:
        storage = self.config.storage
        store = Store(self.config.run.dir, storage.options, storage.single_writer)
        leftovers.remove(self.config.run.name, store)


def renewal_interval(config: RunConfig) -> float:
    """Seconds between two renewals: several fit into the time after which the run counts as abandoned."""
    return min(5.0, config.recovery.orphan_timeout / 4)


@contextlib.contextmanager
def kept(config: RunConfig, attempt: int) -> Iterator[None]:
    """Have a keeper, and renew its lease, while this is entered; at its end nothing is left of the run, or of the keeper."""
    keeper = hire(config, attempt)
    ended = threading.Event()

    def renew() -> None:
        nonlocal keeper
        while not ended.wait(renewal_interval(config)):
            try:
                ray.get(keeper.renew.remote(attempt), timeout=HIRE_SECONDS)
            except FencedError:
                return  # a newer attempt keeps the run; who watches for it ends this one
            except Exception:  # noqa: BLE001 - whatever it is, only another keeper helps
                with contextlib.suppress(Exception):
                    keeper = hire(config, attempt)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(ray.exceptions.RayError, FencedError):  # a keeper that is gone clears when it is back
            ray.get(keeper.release.remote(attempt), timeout=HIRE_SECONDS)
            ray.kill(keeper)


def hire(config: RunConfig, attempt: int) -> Any:
    """The run's keeper, working for this attempt from now on: the one that stands, or a new one.

    One that is about to go is waited for. FencedError if a newer attempt has hired it.
    """
    deadline = time.monotonic() + HIRE_SECONDS
    while True:
        keeper = (
            ray.remote(Keeper)
            .options(
                name=keeper_name(config.run.name),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,  # its node may be lost
            )
            .remote(config, attempt)
        )
        try:
            ray.get(keeper.hire.remote(config, attempt), timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(TRY_AGAIN_SECONDS)
            continue
        except KeyboardInterrupt:  # stopped before anything was placed
            ray.kill(keeper)
            raise
        return keeper
