"""Every name that a run gives to things in the Ray cluster. The state API lists them, so they tell the whole story."""

NAMESPACE = "linckia"
TOKEN_HEADER = "X-Linckia-Token"
TOKEN_VARIABLE = "LINCKIA_TOKEN"
SUPERVISOR_VARIABLE = "LINCKIA_SUPERVISOR"  # in a controller's environment: the pid of its supervisor
BUNDLE_VARIABLE = (
    "LINCKIA_BUNDLE"  # in a job's environment: its config and what files that names, as ``api.bundle`` packs them
)
BUNDLE = "bundle:"  # given as CONFIG: the one in that variable
API_VERSION = 1


def actor_name(run: str, group: str, generation: int, rank: int) -> str:
    """The Ray actor of one member, such as ``sort-seed1/policy/2/0``."""
    return f"{run}/{group}/{generation}/{rank}"


def parse_actor_name(name: str) -> tuple[str, str, int, int] | None:
    """(run, group, generation, rank) of a member's name; None for the name of anything else."""
    parts = name.split("/")
    if len(parts) != 4 or parts[1] == "controller" or not (parts[2].isdigit() and parts[3].isdigit()):
        return None
    return parts[0], parts[1], int(parts[2]), int(parts[3])


def placement_group_name(run: str, number: int) -> str:
    """One placement group of a run, such as ``sort-seed1/pg/0``."""
    return f"{run}/pg/{number}"


def beacon_name(run: str, attempt: int, ip: str, port: int) -> str:
    """The 0-CPU actor that lives as long as its controller and says where the control API listens.

    Example: ``sort-seed1/controller/3/10.0.0.7:8470``
    """
    return f"{run}/controller/{attempt}/{ip}:{port}"


def parse_beacon_name(name: str) -> tuple[str, int, str] | None:
    """(run, attempt, ``ip:port``) of a beacon's name; None for the name of anything else."""
    parts = name.split("/")
    if len(parts) != 4 or parts[1] != "controller" or not parts[2].isdigit():
        return None
    return parts[0], int(parts[2]), parts[3]


def keeper_name(run: str) -> str:
    """The actor that frees what a run holds once nobody continues it, such as ``sort-seed1/keeper``."""
    return f"{run}/keeper"


def rollout_group(engine: int) -> str:
    """The group of one engine, such as ``rollout-0``."""
    return f"rollout-{engine}"


def role_of(group: str) -> str:
    """The role of a group: ``rollout`` of ``rollout-3``, else the group's own name."""
    return "rollout" if group.startswith("rollout-") else group
