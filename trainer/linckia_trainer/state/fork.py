"""``linckia train --fork NAME``: a new run whose state 0 is another run's newest checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from linckia.api.errors import UserError
from linckia_trainer.log import framing
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.records import Carried
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import Choice, newest_valid, refusals
from linckia_trainer.state.format import StateHeader, read_payload
from linckia_trainer.state.tiers import RUN_DIRECTORY, StateRef, Tier, list_states, verify_state

_KEY = "fork.json"


@dataclass(frozen=True)
class Fork:
    """Where a run comes from: the step ``step`` of run ``run`` in ``uri``. ``carried``: what its step 1 starts from.

    None in ``carried`` means that the source had not trained yet: the new run begins like any other.
    """

    run: str
    uri: str
    step: int
    log_hash: str
    carried: Carried | None


@dataclass(frozen=True)
class ForkPoint:
    """A step of the source run for which every stateful group has a whole durable state, and those states."""

    fork: Fork
    states: dict[str, Choice]


def find_fork_point(store: Store, run: str, log: RunLog, groups: Mapping[str, int]) -> ForkPoint:
    """The newest step of run ``run`` in ``store`` at which every group has a complete, valid, whole durable state.

    ``groups``: the stateful groups and their world sizes. Every byte of the states is read once. UserError if there is
    none.
    """
    tiers = [Tier(RUN_DIRECTORY, store)]
    refs = {group: list_states(tiers, group, run) for group in groups}
    steps = set.intersection(*({ref.step for ref in found} for found in refs.values())) if refs else set()
    for step in sorted(steps, reverse=True):
        states = {
            group: choice
            for group, world in groups.items()
            if (choice := _whole_state_at(tiers, refs[group], step, world, log))
        }
        if states.keys() == groups.keys():
            log_hash = log.log_hash(step)
            return ForkPoint(Fork(run, store.uri, step, log_hash, _carried(store, log, step)), states)
    reasons = [reason for group in groups for reason in refusals(refs[group], groups[group], log.head(), log.hash_at)]
    raise UserError(
        "--fork",
        store.uri,
        f"it has no step with a whole checkpoint of {' and '.join(groups)} ({'; '.join(reasons) or 'none was found'})",
        "let it train until it has saved one",
    )


def fork(target: Store, new_run: str, new_origin: str, point: ForkPoint, source: Store) -> Fork:
    """Copy the point's states as state 0 of ``new_run``, whose log_hash(0) is ``new_origin``; the source is untouched.

    ``fork.json`` is written last and makes it so: killed before, the same call does it again. UserError if the target
    is a fork already.
    """
    if target.exists(_KEY):
        raise UserError("--fork", new_run, f"{target.uri} is a fork already", "choose another name, or train it on")
    for choice in point.states.values():
        for ref in choice.refs:
            header, _, payload = read_payload(source, ref.key)
            new = StateHeader(new_run, header.group, 0, header.rank, header.world, new_origin, attempt=0, generation=0)
            target.put(new.key, framing.frame({"kind": "state", **asdict(new)}, [payload]))
    found = {**asdict(point.fork), "carried": point.fork.carried and point.fork.carried._asdict()}
    target.put_if_absent(_KEY, canonical_json(found))
    return point.fork


def read_fork(store: Store) -> Fork | None:
    """Where a run was forked from; None if it was not."""
    try:
        found = json.loads(store.get(_KEY))
    except FileNotFoundError:
        return None
    return Fork(**{**found, "carried": found["carried"] and Carried(**found["carried"])})


def _whole_state_at(tiers: list[Tier], refs: list[StateRef], step: int, world: int, log: RunLog) -> Choice | None:
    choice = newest_valid([ref for ref in refs if ref.step == step], world, log.head(), log.hash_at)
    whole = choice is not None and not any(verify_state(tiers, ref) for ref in choice.refs)
    return choice if whole else None


def _carried(store: Store, log: RunLog, step: int) -> Carried | None:
    if step:
        return log.read(step).carried()
    before = read_fork(store)
    return before.carried if before else None
