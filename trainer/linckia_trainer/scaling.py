"""Engines added to and taken from a live run, by the path that replaces lost ones."""

from typing import TYPE_CHECKING

from linckia.api.errors import UserError
from linckia.api.names import rollout_group
from linckia.api.plan import plan
from linckia_trainer.groups import placement
from linckia_trainer.groups.fence import fence
from linckia_trainer.groups.group import ActorGroup

if TYPE_CHECKING:
    from linckia_trainer.run import Run


def request(run: "Run", engines: int) -> None:
    """Ask for this many engines; the loop brings them up beside its work, or lets the last ones go after their step.

    Callable from any thread. UserError where engines cannot come and go.
    """
    if engines < 1:
        raise UserError("engines", engines, "a run needs at least one engine", "give 1 or more, or stop the run")
    if run.config.placement.colocation == "all":
        raise UserError(
            "engines",
            engines,
            "with placement.colocation: all the engines share the trained groups' devices, which are given at the start",
            "stop the run, set rollout.engines, and start it again: it goes on from its log",
        )
    run.wanted_engines = engines


def adjust(run: "Run") -> None:
    """Bring the engines' number towards what was asked for. Main thread only; waits for nothing."""
    if run.wanted_engines is None:
        return
    while len(run.engines) < run.wanted_engines:
        add(run)
    while len(run.engines) > run.wanted_engines:
        run.leaving.append(run.engines.pop())  # what it was given is still taken from it; it gets nothing new


def add(run: "Run") -> None:
    """One more engine: planned as if the run had had it from the start, brought up like one that was lost."""
    site, name = run.healer.site, rollout_group(len(run.engines))
    returned = next((engine for engine in run.leaving if engine.name == name), None)
    if returned is not None:
        run.leaving.remove(returned)
        run.engines.append(returned)
        return
    rollout = run.config.rollout.model_copy(update={"engines": len(run.engines) + 1})
    planned = plan(run.config.model_copy(update={"rollout": rollout}), site.device == "cuda")
    site.plans[name] = planned.group(name)
    site.unplaced |= {group.key: group for group in planned.placement_groups if group.key == name}
    engine = ActorGroup(name, [], run.attempt, 0)
    run.engines.append(engine)
    run.healer.bring_up(engine)


def let_go(run: "Run") -> None:
    """Between generations: end the engines that are no longer wanted and give their devices back."""
    site = run.healer.site
    for engine in [engine for engine in run.leaving if not run.healer.returning(engine)]:
        run.leaving.remove(engine)
        run.healer.forget(engine)
        fence(engine.members, engine.processes)
        if (placed := site.placed.pop(engine.name, None)) is not None:
            placement.release({engine.name: placed})
        run.progress.message(f"{engine.name} is taken out of the run")
