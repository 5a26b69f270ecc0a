"""From what is wrong in a run config to a UserError a person can act on: key, value, reason, next step."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from linckia.api.config import RunConfig
from linckia.api.errors import UserError

Key = tuple[str | int, ...]

# pydantic's error type -> what the value has to be. {names} are the error's own parameters.
_REASONS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a section with keys of its own",
    "dict_type": "must be a section of names and values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} values",
    "too_long": "must have at most {max_length} values",
    "value_error": "{error}",
}


@dataclass
class Source:
    """Where each value of a config was written: lines of its file, and the overrides on the command line."""

    path: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    overrides: tuple[Key, ...] = ()

    def where(self, key: Key) -> str:
        """Where the value at ``key`` (or the nearest section above it) was written, in words."""
        if any(override[: len(key)] == key or key[: len(override)] == override for override in self.overrides if key):
            return "given on the command line"
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.path}, line {self.lines[key]}" if key else self.path


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The section a field holds (also an optional one); None for a plain value."""
    annotation = info.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def walk_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of the config with its field, sections before what is in them."""
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if (section := section_of(info)) is not None:
            yield from walk_fields(section, f"{prefix}{name}.")


def nearest_key(dotted: str) -> str | None:
    """The key that someone who wrote ``dotted`` most likely meant; None when nothing is near.

    A right last name in the wrong section (``policy.lr``) comes before a misspelt last name.
    """
    keys = [key for key, _ in walk_fields()]
    parent, _, leaf = dotted.rpartition(".")
    for candidates, cutoff in (
        ([key for key in keys if key.rpartition(".")[2] == leaf], 0.0),
        ([key for key in keys if key.rpartition(".")[0] == parent], 0.75),
        (keys, 0.6),
    ):
        if found := difflib.get_close_matches(dotted, candidates, n=1, cutoff=cutoff):
            return found[0]
    return None


def explain(error: ValidationError, source: Source) -> UserError:
    """The first thing to put right, unknown keys first: a misspelt key is also a missing one."""
    details = error.errors(include_url=False)
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    first, others = details[0], len(details) - 1
    key = dotted_key(first["loc"])
    value, reason, next_step = _explain_one(key, first)
    more = f"; {others} more to put right after it" if others else ""
    return UserError(key, value, f"{reason} ({source.where(first['loc'])}{more})", next_step)


def dotted_key(loc: Key) -> str:
    return ".".join(str(part) for part in loc)


def _explain_one(key: str, detail: ErrorDetails) -> tuple[object, str, str]:
    infos = dict(walk_fields())
    info = infos.get(key)
    kind, value = detail["type"], detail["input"]
    if isinstance(value, dict | BaseModel):
        value = None  # a whole section says nothing more than its key
    if kind == "extra_forbidden":
        nearest = nearest_key(key)
        if nearest is None:
            parent = key.rpartition(".")[0]
            siblings = ", ".join(name.rpartition(".")[2] for name in infos if name.rpartition(".")[0] == parent)
            return value, "there is no such key", f"remove it; the keys of {parent or 'a config'} are {siblings}"
        return value, f"there is no such key; the nearest is {nearest}", f"write {nearest}, or remove it"
    meaning = f" ({info.description})" if info is not None and info.description else ""
    if kind == "missing":
        return None, "is missing and has no default", f"add {key}{meaning}"
    reason = _REASONS.get(kind, "has a value that does not fit").format(**detail.get("ctx", {}))
    if kind == "literal_error" and isinstance(value, str):
        words = [word for word in _choices(info) if isinstance(word, str)]
        if close := difflib.get_close_matches(value, words, n=1):
            reason += f"; the nearest is {close[0]!r}"
    if "type" in kind or "parsing" in kind:
        reason += f", this is {_in_words(detail['input'])}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return value, reason, f"put it in quotes: {key}: '{value}'"
    return value, reason, f"correct {key}{meaning}"


def _choices(info: FieldInfo | None) -> tuple[Any, ...]:
    return get_args(info.annotation) if info is not None else ()


def _in_words(value: object) -> str:
    words: dict[type, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        dict: "a section of keys",
        NoneType: "empty",
    }
    return words.get(type(value), "something else")


# ---- YAML --------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-6 is a number (YAML 1.1 wants 1.0e-6), and a date stays the text it is."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, path: str) -> tuple[dict[str, Any], dict[Key, int]]:
    """The mapping in ``text`` and the line of each key. Raises UserError with the line for what is no such YAML."""
    lines: dict[Key, int] = {}
    data = _load(text, path, lines)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UserError(path, None, f"holds {_in_words(data)} where sections such as `run:` belong", "see examples/")
    return data, lines


def read_value(text: str, override: str) -> Any:
    """The YAML value of an override on the command line, such as ``[a, b]``, ``1e-6``, ``null`` or plain words."""
    return _load(text, override, {})


def _load(text: str, name: str, lines: dict[Key, int]) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _record_lines(node, (), lines, name)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(name, None, f"{line}is not YAML: {error.problem}", "correct that line") from None
    except yaml.YAMLError as error:
        raise UserError(name, None, f"is not YAML: {error}", "save it as plain UTF-8 text") from None
    finally:
        loader.dispose()


def _record_lines(node: yaml.Node, key: Key, lines: dict[Key, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            inner = (*key, str(key_node.value))
            line = key_node.start_mark.line + 1
            if inner in lines and key_node.value != "<<":
                reason = f"stands twice, on lines {lines[inner]} and {line} of {name}"
                raise UserError(dotted_key(inner), None, reason, "remove one of them")
            lines[inner] = line
            _record_lines(value_node, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*key, index)] = item.start_mark.line + 1
            _record_lines(item, (*key, index), lines, name)
