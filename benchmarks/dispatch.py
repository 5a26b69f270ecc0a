"""``call_sharded`` against bare ``ray.put`` + ``remote``, at 1, 10 and 100 MB.

Everyone puts each member's slice once into the object store and waits until all members have it. ``bare`` cuts the same slices,
balanced by tokens, by hand: ``ratio`` is what our dispatch adds; goal: at most 1.1. ``bare_unbalanced`` sends plain runs of
rows, which need no copy to be cut: the difference is what balancing costs, one more copy of the batch in memory.
Prints JSON: medians of alternating rounds, in milliseconds.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from linckia_trainer.experience.batching import shard
from linckia_trainer.groups.group import ActorGroup
from linckia_trainer.groups.member import Identity, Member

MEMBERS, TOKENS = 4, 1024
SIZES_MB = {1: 60, 10: 40, 100: 15}  # size -> rounds


class Receiver(Member):
    """Takes a slice and says how many rows it has."""

    def take(self, arrays: dict[str, Any]) -> int:
        return len(arrays["lengths"])


def make_batch(megabytes: int) -> dict[str, Any]:
    """Rows of ``TOKENS`` tokens and three columns of numbers for each token, ``megabytes`` in all."""
    rows = max(MEMBERS, round(megabytes * 1e6 / (TOKENS * 4 * 4)))
    rng = np.random.default_rng(0)
    batch: dict[str, Any] = {"lengths": rng.integers(1, TOKENS + 1, rows).astype(np.int32)}
    batch["tokens"] = rng.integers(0, 1000, (rows, TOKENS)).astype(np.int32)
    for name in ("old_log_probs", "advantages", "values"):
        batch[name] = rng.standard_normal((rows, TOKENS)).astype(np.float32)
    batch["loss_mask"] = np.ones((rows, 1), np.uint8)
    return batch


def milliseconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def measure(group: ActorGroup, megabytes: int, rounds: int) -> dict[str, Any]:
    batch = make_batch(megabytes)

    def ours() -> None:
        group.call_sharded("take", batch).results()

    def send(slices: list[dict[str, Any]]) -> None:
        refs = [ray.put(part) for part in slices]
        ray.get([m.invoke.remote(1, 1, "take", ref) for m, ref in zip(group.members, refs, strict=True)])

    def bare() -> None:
        send(shard(batch, MEMBERS, True)[0])

    def bare_unbalanced() -> None:
        rows = len(batch["lengths"])
        cuts = [slice(i * rows // MEMBERS, (i + 1) * rows // MEMBERS) for i in range(MEMBERS)]
        send([{name: column[cut] for name, column in batch.items()} for cut in cuts])

    actions = {"ours": ours, "bare": bare, "bare_unbalanced": bare_unbalanced}
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        order = list(actions.items())
        for name, action in order if number % 2 else order[::-1]:
            times[name].append(milliseconds(action))
    medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
    ratio = round(medians["ours"] / medians["bare"], 3)
    return {"rounds": rounds, **medians, "ratio": ratio}


def main() -> None:
    ray.init(address="local", num_cpus=MEMBERS, include_dashboard=False, logging_level="ERROR")
    remote = ray.remote(concurrency_groups={"control": 1})(Receiver)
    members = [remote.remote(Identity("bench", "light", 1, i, MEMBERS, 1), "cpu", 1, 600.0) for i in range(MEMBERS)]
    group = ActorGroup("light", members, 1, 1)
    report = {f"{size} MB": measure(group, size, rounds) for size, rounds in SIZES_MB.items()}
    ray.shutdown()
    print(json.dumps({"members": MEMBERS, **report, "goal": 1.1}, indent=2))


if __name__ == "__main__":
    main()
