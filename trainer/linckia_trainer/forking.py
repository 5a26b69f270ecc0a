"""``linckia train --fork NAME``: which run is meant, whether its states fit, and the new run beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.checks import Checked, identity
from linckia_trainer.local import prepare_folder
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.store import Store
from linckia_trainer.state.fork import find_fork_point, fork

_SHARD_KEYS = ("num_nodes", "num_gpus_per_node", "zero_stage")


def plan_fork(candidates: Sequence[RunConfig], config: RunConfig, name: str) -> tuple[RunConfig, RunConfig]:
    """(the run to fork, the config of the new run ``name``), before anything is read or written.

    ``candidates``: see ``linckia.api.load.fork_sources``. UserError if none or several of them are runs, if the states
    do not fit, or if there is a run ``name`` already.
    """
    candidates = [prepare_folder(one)[0] for one in candidates]
    found = [(one, last) for one in candidates if (last := _last_config(one)) is not None]
    names = " and ".join(f"{one.run.name} ({one.run.dir})" for one in candidates)
    if not found:
        raise UserError(
            "--fork", None, f"there is no run {names}",
            "give run.name of the run to fork, and its run.dir where the config's does not lead there",
        )  # fmt: skip
    if len(found) > 1:
        raise UserError("--fork", None, f"both {names} are runs", "say which to fork with run.name=NAME")
    source, last = found[0]
    check_shards(last, config)
    forked = renamed(config, name)
    if attempts.latest(open_store(forked)) is not None:
        raise UserError(
            "--fork", name, f"there is a run in {forked.run.dir}",
            f"choose another name, or give run.name={name} without --fork to go on with it",
        )  # fmt: skip
    return source, forked


def _last_config(config: RunConfig) -> dict[str, Any] | None:
    """The config of the last attempt of this run, by name and place; None if there is no such run."""
    newest = attempts.latest(open_store(config))
    if newest is None or newest.config.get("run", {}).get("name") != config.run.name:
        return None
    return newest.config


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The config of a fork: another name, and a run directory beside the source's."""
    place = str(config.run.dir).rstrip("/")
    return config.model_copy(
        update={"run": config.run.model_copy(update={"name": name, "dir": f"{place.rpartition('/')[0]}/{name}"})}
    )


def check_shards(source: Mapping[str, Any], config: RunConfig) -> None:
    """UserError if the groups are cut otherwise than those of the run to fork, whose last config is ``source``."""
    for role in ("policy", "critic") if config.has_critic else ("policy",):
        was, now = source.get(role, {}), getattr(config, role).model_dump()
        world = _world(was), _world(now)
        changed = [key for key in _SHARD_KEYS if key in was and was[key] != now[key]]
        if world[0] == world[1]:
            changed = [key for key in changed if key == "zero_stage"]
        if changed:
            keys = ", ".join(f"{role}.{key}" for key in changed)
            values = "; ".join(f"{role}.{key} was {was[key]} and is {now[key]}" for key in changed)
            raise UserError(
                keys, None,
                f"{values}: saved states would have to be converted to other shards, which is not possible yet",
                f"set {keys} back for the fork, or start a new run with another run.name",
            )  # fmt: skip


def _world(group: Mapping[str, Any]) -> int:
    return int(group.get("num_nodes", 1)) * int(group.get("num_gpus_per_node", 1))


def fork_from(source: RunConfig, checked: Checked, target: Store) -> int:
    """Make ``target`` a run whose state 0 is the newest checkpoint of ``source``; returns that checkpoint's step."""
    store = open_store(source)
    config = checked.config
    worlds = {"policy": config.policy.world_size}
    if config.has_critic:
        worlds["critic"] = config.critic.world_size
    point = find_fork_point(store, source.run.name, RunLog(store, None), worlds)
    forked_origin = identity(
        checked, {"run": source.run.name, "step": point.fork.step, "log_hash": point.fork.log_hash}
    )
    fork(target, config.run.name, forked_origin, point, store)
    return point.fork.step


def open_store(config: RunConfig) -> Store:
    return Store(config.run.dir, config.storage.options, config.storage.single_writer)
