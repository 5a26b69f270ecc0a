"""From a target's name to the process that is meant. Pure but for a look into /proc."""

from collections.abc import Mapping
from typing import Any

from linckia.api.errors import UserError
from linckia.api.process import start_time
from linckia.faults.inject import Aim, Fault

CONTROLLER = "controller"
View = Mapping[str, Any]


def choose_fault(faults: Mapping[str, Fault], name: str) -> Fault:
    """UserError, with all names, for one that is not there."""
    if name not in faults:
        raise UserError("--fault", name, f"there is no such fault; there are {', '.join(faults)}", "choose one of them")
    return faults[name]


def split_target(target: str) -> tuple[str, int]:
    """(group, rank) of ``GROUP`` or ``GROUP/RANK``."""
    group, _, rank = target.partition("/")
    if rank and not rank.isdigit():
        raise UserError("--target", target, "the rank is no number", "give GROUP or GROUP/RANK, such as policy/1")
    return group, int(rank or 0)


def check_target(view: View, target: str, fault: Fault) -> None:
    """UserError, with those that the run has, for a target it has not or that the fault does not take."""
    group, rank = split_target(target)
    there = targets(view, fault)
    if not {f"{group}/{rank}", group} & set(there):
        raise UserError(
            "--target",
            target,
            f"this fault takes {', '.join(there) or 'nothing that stands now'}",
            "choose one of them",
        )


def targets(view: View, fault: Fault) -> list[str]:
    """Every target in the run that a fault takes; a group whose members were not heard of yet is named alone."""
    if fault.targets == "controller":
        return [CONTROLLER]
    found = []
    for name, group in view.get("groups", {}).items():
        if not group.get("members"):
            found.append(name)
            continue
        stateful = any("applied_step" in member and member.get("log_hash") for member in group.get("members", []))
        if fault.targets == "member" or stateful:
            found += [f"{name}/{member['rank']}" for member in group.get("members", [])]
    return found


def aim_at(view: View, target: str) -> Aim | None:
    """The member's process as it stands; None while its generation is on the way and no process of it is known."""
    group, rank = split_target(target)
    shown = view.get("groups", {}).get(group, {})
    for member in shown.get("members", []):
        if member.get("rank") == rank and member.get("generation") == shown.get("generation"):
            listed = {one["pid"]: one.get("start_time") for one in member.get("processes", [])}
            return Aim(group, rank, member["pid"], listed.get(member["pid"]), member["generation"])
    return None


def aim_at_controller(pid: int, host_is_here: bool) -> Aim:
    """The controller of the newest attempt. UserError if it runs on another machine or has ended."""
    started = start_time(pid) if host_is_here else None
    if started is None:
        where = "is gone" if host_is_here else "runs on another machine"
        raise UserError("--target", CONTROLLER, f"its process {pid} {where}", "run this where the controller runs")
    return Aim(CONTROLLER, 0, pid, started)


def stands(view: View, group: str, newer_than: int) -> bool:
    """Whether a generation after ``newer_than`` is at work with every member."""
    shown = view.get("groups", {}).get(group, {})
    members = shown.get("members", [])
    return (
        shown.get("generation", 0) > newer_than
        and not shown.get("returning", False)
        and bool(members)
        and all(one.get("generation") == shown["generation"] for one in members)
    )
