"""Which states and records may go. Pure: the caller deletes, once it is sure that it still is the newest attempt."""

from collections.abc import Collection, Iterable, Mapping

from linckia_trainer.state.choose import HashAt, candidates
from linckia_trainer.state.tiers import StateRef


def states_to_delete(refs: Iterable[StateRef], keep: int, world: int, log_head: int, hash_at: HashAt) -> list[StateRef]:
    """The states of one group in one tier that may go, so that its newest ``keep`` restorable ones stay.

    Only states that could be restored now count as kept: a damaged, incomplete or outdated one never pushes a good one
    out. Whatever is newer than the newest restorable state stays: it may still be being written.
    """
    found = candidates(refs, world, log_head, hash_at)
    restorable = [candidate for candidate in found if candidate.refused is None]
    if not restorable:
        return []
    by_step = {candidate.step: candidate for candidate in reversed(restorable)}  # of one step, the newest attempt's
    kept = [by_step[step] for step in sorted(by_step, reverse=True)[:keep]]
    oldest_unfinished = found.index(restorable[0])
    return [ref for candidate in found[oldest_unfinished:] if candidate not in kept for ref in candidate.refs]


def records_to_prune(head: int, durable_steps: Mapping[str, Collection[int]], log_keep: int | None) -> range:
    """The steps whose records no recovery will need and ``log_keep`` (None: keep all) does not ask for.

    ``durable_steps``: for every stateful group, the steps of its complete durable states that were read back and found
    whole. A record goes only if each group has two of them at or after its step; the head never goes.
    """
    if log_keep is None or not durable_steps:
        return range(1, 1)
    second_newest = [sorted({0, *steps})[-2] if len({*steps}) > 1 else 0 for steps in durable_steps.values()]
    return range(1, min(head - max(log_keep, 1), *second_newest) + 1)
