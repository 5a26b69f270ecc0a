"""From a config file and ``section.key=value`` overrides to a RunConfig, and what of it decides a run's result.

Relative paths in a config are relative to the current directory, as everything on a command line is; a file that is
missing there and stands beside the config file is taken from beside it. Paths come out absolute; URIs and hub names
stay as they are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia.api.explain import Key, Source, explain, nearest_key, read_value, read_yaml, section_of

M = TypeVar("M", bound=BaseModel)

# Keys that hold a path. What decides is the content (see `content_paths`), so a moved file does not change a run.
_FILES = ("data.train.file", "data.held_out.file")
_FOLDERS_OR_HUB_NAMES = ("model.path", "reward.model")
_CODE = ("model.make", "reward.function")

# The shards of a saved state follow from these, so changing one needs the states converted.
_SHARD_KEYS = {
    f"{role}.{key}" for role in ("policy", "critic") for key in ("num_nodes", "num_gpus_per_node", "zero_stage")
}


def load_config(path: str | Path, overrides: Sequence[str] = (), elsewhere: bool = False) -> RunConfig:
    """Read a run config. Every mistake in it is a UserError with key, value, place, reason and next step.

    ``overrides`` are ``section.key=value`` with the value in YAML; they win over the file. ``run.name`` and ``run.dir``
    come out filled, paths come out absolute. ``elsewhere``: the run is for other machines, which may have files under
    absolute paths that this one has not.
    """
    path = Path(path)
    data, lines, keys = _read(path, overrides)
    source = Source(str(path), lines, keys)
    try:
        # Strict JSON: no text taken for a number, no 1 for true; lists are fine where tuples are meant.
        config = RunConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise explain(error, source) from None
    except UserError as error:
        key = tuple(error.field.split("."))
        raise UserError(error.field, error.value, f"{error.reason} ({source.where(key)})", error.next_step) from None
    return _resolved(config, path, source, elsewhere)


def written_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The sections of a config as they are written, overrides applied, nothing checked or filled in."""
    return _read(Path(path), overrides)[0]


def local_files(config: RunConfig) -> dict[str, str]:
    """Dotted key -> value of everything in a loaded config that names a file or folder: ``reward.function`` with its name."""
    values = {key: _get(config, key) for key in (*_FILES, *_FOLDERS_OR_HUB_NAMES, *_CODE)}
    return {key: value for key, value in values.items() if value is not None and _is_local(value)}


def fork_sources(path: str | Path, overrides: Sequence[str] = ()) -> list[RunConfig]:
    """The runs that ``--fork`` with these arguments may mean: the one they name, and where ``run.seed=...`` made that name,
    the one that they name without it, for overrides belong to the new run."""
    named = load_config(path, overrides)
    other = load_config(path, [one for one in overrides if one.partition("=")[0].strip() != "run.seed"])
    return [named] if other.run.name == named.run.name else [named, other]


def deciding_values(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> JSON value of everything in the config that decides the run's result.

    Free keys are left out, the run's name, and the paths of files and folders: their content decides, so whoever hashes this adds a
    hash of each of `content_paths`. Hub names stay. ``decay_steps`` is what it comes to, and None with a constant
    schedule, where it (and so ``run.steps``) decides nothing.
    """
    values: dict[str, Any] = {}
    _collect(config, "", values)
    for role in ("policy", "critic"):
        optimizer = getattr(config, role).optimizer
        decay_steps = optimizer.decay_steps or config.run.steps
        values[f"{role}.optimizer.decay_steps"] = None if optimizer.schedule == "constant" else decay_steps
    for key in (*_FILES, "model.make"):
        values.pop(key, None)
    for key in _FOLDERS_OR_HUB_NAMES:
        if values[key] is not None and _is_local(values[key]):
            del values[key]
    if (function := config.reward.function) is not None:
        values["reward.function"] = function.rpartition(":")[2]
    return values


def content_paths(config: RunConfig) -> dict[str, Path]:
    """Dotted key -> the local file or folder whose content decides the run's result."""
    paths = {}
    for key in (*_FILES, *_FOLDERS_OR_HUB_NAMES):
        value = _get(config, key)
        if value is not None and _is_local(value):
            paths[key] = Path(value)
    if config.reward.function is not None:
        paths["reward.function"] = Path(config.reward.function.rpartition(":")[0])
    return paths


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, also those that only one of the two has, in order."""
    missing = object()
    return sorted(key for key in old.keys() | new.keys() if old.get(key, missing) != new.get(key, missing))


def refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise UserError if the deciding values of a run directory (``old``) are not those of the config at hand."""
    changed = changed_keys(old, new)
    if not changed:
        return
    listed = "; ".join(f"{key} was {_shown(old, key)} and is {_shown(new, key)}" for key in changed)
    reason = f"the run directory was made with another config: {listed}"
    shards = [key for key in changed if key in _SHARD_KEYS]
    steps = []
    if shards:
        reason += (
            f". {', '.join(shards)}: saved states would have to be converted to other shards, which is not possible yet"
        )
        steps.append(f"set {', '.join(shards)} back, or start a new run with another run.name")
    if len(shards) < len(changed):
        others = [key for key in changed if key not in _SHARD_KEYS]
        steps.append(
            f"set {', '.join(others)} back, give --fork NAME to go on from this run's newest checkpoint as a new run, "
            "or start afresh with another run.name"
        )
    raise UserError(", ".join(changed), None, reason, "; ".join(steps))


def default_run_name(path: Path, seed: int) -> str:
    """The config file's stem and the seed; what a name may not hold becomes a dash."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    return f"{stem[:48]}-seed{seed}"


# ---- parts -------------------------------------------------------------------------------------------------------


def _read(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[Key, int], tuple[Key, ...]]:
    data, lines = read_yaml(_read_text(path), str(path))
    return data, lines, tuple(_apply_override(data, override) for override in overrides)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("CONFIG", str(path), "there is no such file", "give the path of a run config (YAML)") from None
    except IsADirectoryError:
        raise UserError("CONFIG", str(path), "is a folder", "give the path of a run config (YAML)") from None
    except UnicodeDecodeError:
        raise UserError("CONFIG", str(path), "is not text in UTF-8", "give the path of a run config (YAML)") from None
    except OSError as error:
        raise UserError("CONFIG", str(path), f"cannot be read: {error.strerror}", "check the file's rights") from None


def _apply_override(data: dict[str, Any], override: str) -> Key:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        nearest = nearest_key(dotted.strip()) or "run.seed"
        raise UserError("override", override, "is not section.key=value", f"write it like {nearest}=VALUE")
    section = data
    for depth, part in enumerate(parts[:-1], start=1):
        inner = section.get(part)
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            above = ".".join(parts[:depth])
            raise UserError(
                dotted, text, f"{above} holds {inner!r} and no keys", f"give {above} a section, or override it"
            )
        section = inner
    section[parts[-1]] = read_value(text, override)
    return tuple(parts)


def _resolved(config: RunConfig, path: Path, source: Source, elsewhere: bool) -> RunConfig:
    name = config.run.name or default_run_name(path, config.run.seed)
    directory = config.run.dir.replace("{name}", name)
    if re.search(r"[{}]", directory):
        reason = f"only {{name}} may stand in braces ({source.where(('run', 'dir'))})"
        raise UserError("run.dir", config.run.dir, reason, "remove the other braces")
    changes: dict[str, str] = {"run.name": name, "run.dir": directory}
    for key in (*_FILES, *_FOLDERS_OR_HUB_NAMES, *_CODE):
        value = _get(config, key)
        if value is None or "://" in value:
            continue
        file, colon, function = value.rpartition(":") if key in _CODE else (value, "", "")
        found = _find(file, path.parent)
        if found.exists():
            changes[key] = f"{found}{colon}{function}"
        elif elsewhere and file.startswith("/"):
            continue
        elif key not in _FOLDERS_OR_HUB_NAMES:
            reason = f"there is no file {file} here or beside the config file ({source.where(tuple(key.split('.')))})"
            raise UserError(key, value, reason, "correct the path")
        elif file.startswith((".", "/", "~")) or (key == "model.path" and config.model.make is not None):
            changes[key] = str(found)  # written by model.make, or reported with the model
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def _find(file: str, beside: Path) -> Path:
    here = Path(file).expanduser().absolute()
    there = (beside / Path(file).expanduser()).absolute()
    return there if there.exists() and not here.exists() else here


def _with(model: M, key: list[str], value: str) -> M:
    inner: Any = value if len(key) == 1 else _with(getattr(model, key[0]), key[1:], value)
    return model.model_copy(update={key[0]: inner})


def _get(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _is_local(path: str) -> bool:
    return Path(path).is_absolute()


def _collect(model: BaseModel, prefix: str, values: dict[str, Any]) -> None:
    for name, info in type(model).model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and (extra.get("free") or extra.get("fixed")):
            continue
        value = getattr(model, name)
        if section_of(info) is not None and value is not None:
            _collect(value, f"{prefix}{name}.", values)
        else:
            values[prefix + name] = json.loads(json.dumps(value))


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not there"
