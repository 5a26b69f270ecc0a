"""``linckia checkpoints rewind RUN --to STEP``: what came after a step is moved aside, and never deleted."""

import time
from collections.abc import Iterator, Mapping

from linckia.api.errors import LiveRunError, UserError
from linckia_trainer.log.chain import RunLog, skip_key
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import newest_valid, refusals
from linckia_trainer.state.format import parse_key
from linckia_trainer.state.tiers import NODE_MEMORY, RUN_DIRECTORY, StateRef, Tier, list_states


def rewind(
    store: Store, node_memory: Store | None, to_step: int, groups: Mapping[str, int], *, log: RunLog, live: bool
) -> list[str]:
    """Move records, skip marks, spooled trajectories and states later than ``to_step`` into ``rewound/{n}/``.

    ``groups``: the stateful groups and their world sizes; ``log``: the log of ``store``; ``live``: whether an attempt
    of the run is alive. Returns the keys as they were. States in node memory are moved within node memory. If it is
    killed on the way, calling it again finishes the work. Raises LiveRunError on a live run; UserError on a step beyond
    the head or one that a group could not be restored to.
    """
    if live:
        raise LiveRunError("RUN", store.uri, "an attempt of this run is alive", "stop it with `linckia stop`")
    if not 0 <= to_step <= log.head():
        raise UserError("--to", to_step, f"the log has steps 0 to {log.head()}", "choose one of them")
    tiers = [Tier(NODE_MEMORY, node_memory)] if node_memory else []
    tiers.append(Tier(RUN_DIRECTORY, store))
    for group, world in groups.items():
        _check_restorable(group, list_states(tiers, group), world, to_step, log)
    number = _claim(store, to_step, log.head())
    moved = []
    for tier in tiers:
        keys = list(_later(tier.store, to_step))
        if tier.store is store and to_step in log.marked() and not log.skipped(to_step):
            keys.append(skip_key(to_step))  # it counted for nothing and would count again at the head
        for key in keys:
            tier.store.move(key, f"rewound/{number}/{key}")
        moved += keys
    log.refresh()
    return moved


def _later(store: Store, to_step: int) -> Iterator[str]:
    """Keys of what came after a step, the latest first: cut short at any point, the log has no gap."""
    for key in sorted(store.list("log"), reverse=True):
        if int(key.removeprefix("log/")[:8]) > to_step:
            yield key
    for key in store.list("state"):
        parsed = parse_key(key)
        if parsed and parsed[1] > to_step:
            yield key


def _check_restorable(group: str, refs: list[StateRef], world: int, to_step: int, log: RunLog) -> None:
    """UserError unless the group has a valid state at or before the step, and the records from there to the step.

    The step's own record is needed too: it will be the head, from which the run goes on.
    """
    choice = newest_valid(refs, world, to_step, log.hash_at)
    if choice is None:
        reasons = "; ".join(refusals(refs, world, to_step, log.hash_at)) or "there is none"
        raise UserError(
            "--to", to_step, f"no state of group {group} at or before it can be restored ({reasons})",
            "choose a later step; `linckia checkpoints RUN` lists the states",
        )  # fmt: skip
    for step in range(min(choice.step + 1, to_step), to_step + 1):
        for reason in log.problems(step, deep=True):
            raise UserError(
                "--to", to_step, f"the record of step {step} is damaged too ({reason})", f"rewind to step {step - 1}"
            )


def _claim(store: Store, to_step: int, head: int) -> int:
    """The next free number below ``rewound/``."""
    number = 1
    note = canonical_json({"to_step": to_step, "head": head, "time": time.time()})
    while not store.put_if_absent(f"rewound/{number}/rewind.json", note):
        number += 1
    return number
