"""The only recovery rule, as pure functions.

A group restores its newest state that is complete on every rank, in any tier, with applied_step <= log head and the
log's log_hash at that step; then it applies the records it lacks. (A dirty member saves nothing, so every saved
state is clean.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from linckia_trainer.state.tiers import StateRef

HashAt = Callable[[int], str | None]


@dataclass(frozen=True)
class Choice:
    """A state complete on every rank. ``refs``: one per rank, in rank order, each from the first tier that has it."""

    step: int
    log_hash: str
    attempt: int
    generation: int
    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class Candidate:
    """All there is of one (step, log_hash, attempt, generation). ``refused``: why it is no choice; None: it is one."""

    step: int
    log_hash: str
    attempt: int
    generation: int
    refs: tuple[StateRef, ...]
    refused: str | None


def newest_valid(refs: Iterable[StateRef], world: int, log_head: int, hash_at: HashAt) -> Choice | None:
    """The state a group restores; None if it has none.

    ``refs``: its states in all tiers, fastest tier first (``tiers.list_states``). ``hash_at``: the log_hash at a step,
    None where the log cannot say it (``RunLog.hash_at``). To choose again after one turned out damaged, leave its ref
    out or mark it invalid.
    """
    for candidate in candidates(refs, world, log_head, hash_at):
        if candidate.refused is None:
            by_rank = {ref.rank: ref for ref in reversed(candidate.refs) if ref.invalid is None}
            chosen = tuple(by_rank[rank] for rank in range(world))
            return Choice(candidate.step, candidate.log_hash, candidate.attempt, candidate.generation, chosen)
    return None


def refusals(refs: Iterable[StateRef], world: int, log_head: int, hash_at: HashAt) -> list[str]:
    """Why each state that cannot be restored cannot, newest first; for messages."""
    found = candidates(refs, world, log_head, hash_at)
    return [f"{describe(candidate)}: {candidate.refused}" for candidate in found if candidate.refused is not None]


def candidates(refs: Iterable[StateRef], world: int, log_head: int, hash_at: HashAt) -> list[Candidate]:
    """Every saved state with the verdict on it, newest first. Pure."""
    grouped: dict[tuple[int, int, int, str], list[StateRef]] = {}
    for ref in refs:
        grouped.setdefault((ref.step, ref.attempt, ref.generation, ref.log_hash), []).append(ref)
    found = []
    for (step, attempt, generation, log_hash), members in sorted(grouped.items(), key=lambda one: one[0], reverse=True):
        refused = _refuse(members, step, log_hash, world, log_head, hash_at)
        found.append(Candidate(step, log_hash, attempt, generation, tuple(members), refused))
    return found


def describe(candidate: Candidate | Choice) -> str:
    """Such as ``step 12 (attempt 2, generation 1; node_memory, run_directory)``."""
    tiers = ", ".join(dict.fromkeys(ref.tier for ref in candidate.refs))
    return f"step {candidate.step} (attempt {candidate.attempt}, generation {candidate.generation}; {tiers})"


def _refuse(
    members: list[StateRef], step: int, log_hash: str, world: int, log_head: int, hash_at: HashAt
) -> str | None:
    usable = [ref for ref in members if ref.invalid is None]
    if not usable:
        return "; ".join(dict.fromkeys(f"{ref.key} in {ref.tier}: {ref.invalid}" for ref in members))
    worlds = {ref.world for ref in usable}
    if worlds != {world}:
        return f"it was saved by {max(worlds)} ranks and the group has {world}"
    missing = sorted(set(range(world)) - {ref.rank for ref in usable})
    if missing:
        damage = "".join(f"; {ref.key} in {ref.tier}: {ref.invalid}" for ref in members if ref.invalid is not None)
        return f"ranks {missing} of {world} are missing{damage}"
    if step > log_head:
        return f"it is beyond the log's head, {log_head}"
    expected = hash_at(step)
    if expected is None:
        return f"the log does not hold the hash of step {step}"
    if expected != log_hash:
        return f"it was made from another history: its log_hash is {log_hash[:12]} and the log's {expected[:12]}"
    return None
