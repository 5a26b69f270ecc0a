"""Writes docs/configuration.md from the run config's own descriptions; a test holds the two together."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from linckia.api.algorithms import ALGORITHMS
from linckia.api.config import AlgorithmName, Code, Memory, Ports, RunConfig, RunName
from linckia.api.explain import section_of, walk_fields

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRODUCTION = """\
<!-- Written by scripts/config_reference.py from operator/linckia/api/config.py: change it there. -->
# Configuration

A run config is a YAML file of sections. Every key has one place and one meaning; an unknown key is an error that names the
nearest right one. On the command line `section.key=value` wins over the file: `linckia train CONFIG run.seed=2`. The value
is read as YAML, so `rollout.stop='["\\n"]'` is a list and `storage.node_memory=null` turns a section off.

- Paths are relative to the current directory; a file that is not there is looked for beside the config file.
- **May change**: whether a run may go on with another value of the key. The other keys decide the result: they are part of
  the run's identity, and another value needs a new run, or `--fork NAME`.
- `num_nodes`, `num_gpus_per_node` and `zero_stage` of policy and critic cannot change with `--fork` either: saved states
  are cut to them.
- Of files and local folders (data, model, reward code) the content decides. They may move; their content may not change.
- `run.name` stays, though it decides no result: what a run has saved carries its name.
- `run.dir` says where the run is. A run may be moved; where nothing is, a new run starts.
- `run.steps` may grow. A schedule that is not constant and has no `decay_steps` ends at `run.steps`, which then decides the
  result too.
- `null` stands for no value. Sizes of memory are written `16GB` (16 x 10^9) or `16GiB` (16 x 2^30).
"""
NAMES = {int: "whole number", float: "number", str: "text", bool: "true, false", NoneType: "null"}
TEXTS = {
    Memory: "size",
    Code: "file.py:function",
    Ports: "port, range such as 8470-8489",
    RunName: "name",
    AlgorithmName: ", ".join(ALGORITHMS),
}
LIMITS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, info in RunConfig.model_fields.items():
        section = section_of(info)
        assert section is not None, f"{name} is no section"
        parts.append(f"## {name}\n\n{_sentence(section, info)}\n\n{_table(name, section)}")
    return "\n".join(parts)


def _sentence(section: type[BaseModel], info: FieldInfo) -> str:
    text = (section.__dict__.get("__doc__") or info.description or "").strip().partition("\n\n")[0]
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _table(name: str, section: type[BaseModel]) -> str:
    rows = ["| key | values | default | may change | meaning |", "|---|---|---|---|---|"]
    rows += [_row(key, info) for key, info in walk_fields(section, f"{name}.") if _is_value(info)]
    return "\n".join(rows) + "\n"


def _is_value(info: FieldInfo) -> bool:
    """A section that is always there has nothing to say beside its keys; one that may be null has."""
    return section_of(info) is None or NoneType in get_args(info.annotation)


def _row(key: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra
    free = "yes" if isinstance(extra, dict) and extra.get("free") else "no"
    kinds = ", ".join(_kinds(info.rebuild_annotation()))
    cells = (f"`{key}`", kinds, _default(info), free, info.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kinds(kind: Any) -> Iterator[str]:
    """What a value may be, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in TEXTS:
        yield TEXTS[kind]
    elif origin is Annotated:
        yield f"{', '.join(_kinds(arguments[0]))}{_limits(arguments[1:])}"
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from _kinds(one)
    elif origin is Literal:
        yield from (str(one) for one in arguments)
    elif origin is dict:
        yield "section of names and values"
    elif origin is tuple:
        yield "list"
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield "section"
    else:
        yield NAMES[kind]


def _limits(metadata: tuple[Any, ...]) -> str:
    flat = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = [f"{word} {getattr(one, name):g}" for one in flat for name, word in LIMITS if hasattr(one, name)]
    return f" {' and '.join(words)}" if words else ""


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return "on" if isinstance(default, BaseModel) else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    TARGET.write_text(reference())
