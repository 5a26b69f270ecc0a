"""What the documents say exists: files, images, commands, options, config keys, routes; generated pages are up to date."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fastapi.routing import APIRoute

from linckia.api.config import RunConfig
from linckia.api.explain import section_of, walk_fields
from linckia.api.load import load_config
from linckia.cli.main import app
from linckia_trainer.control.server import make_app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FIELDS = dict(walk_fields())
TREES = (".", "trainer/linckia_trainer", "operator/linckia", "operator/linckia/cli", "scripts", "docs")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=ids)


def code_blocks(text: str, language: str) -> list[str]:
    return [block for name, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if name == language]


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def linckia_lines(text: str) -> list[str]:
    """What stands after ``linckia`` in code: in shell blocks to the line's end, in the text to the closing backtick."""
    in_blocks = re.findall(
        r"^(?:.* -- )?(?:\S+/)?linckia ([^\n#|]+)", "\n".join(code_blocks(text, "bash")), re.MULTILINE
    )
    return [line.strip() for line in [*in_blocks, *re.findall(r"`(?:\S+/)?linckia ([^`]+)`", without_blocks(text))]]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_document
def test_links_and_images_exist(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
        if "://" in target:
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{target} in {path.name}"
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor} in {path.name}"


@every_document
def test_files_named_in_code_style_exist(path: Path) -> None:
    text = path.read_text()
    folders = "examples|tests|benchmarks|docs|operator|trainer|scripts"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{name} in {path.name}"
    for name in re.findall(r"`((?:\w+/)?\w+\.py)`", text):
        known = any((ROOT / tree / name).exists() for tree in TREES) or f"# file: {name}" in text
        assert known, f"{name} in {path.name}"


@every_document
def test_commands_options_and_overrides_exist(path: Path) -> None:
    for line in linckia_lines(path.read_text()):
        words = shlex.split(line)
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            named = command.commands.get(words[0]) or command.commands.get("list")  # `linckia checkpoints RUN`
            assert named is not None, f"linckia {line} in {path.name}"
            command, words = named, words[words[0] in command.commands :]
        options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        used = {word for word in words if word.startswith("--")}
        assert used <= options | {"--help"}, f"{used - options} in {line!r} of {path.name}"
        overrides = {word.partition("=")[0] for word in words if re.match(r"\w+\.[\w.]+=", word)}
        assert overrides <= FIELDS.keys(), f"{overrides - FIELDS.keys()} in {line!r} of {path.name}"


@every_document
def test_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = re.findall(r"`make ([a-z-]+)", text)
    used += re.findall(r"^make ([a-z-]+)", "\n".join(code_blocks(text, "bash")), re.MULTILINE)
    assert set(used) <= set(targets), path.name


def test_every_target_is_phony_unless_it_is_a_file() -> None:
    text = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


@every_document
def test_keys_named_in_code_style_exist(path: Path) -> None:
    for key in re.findall(rf"`((?:{'|'.join(RunConfig.model_fields)})\.[\w.]+)", path.read_text()):
        assert key in FIELDS or key.endswith((".py", ".json", ".jsonl")), f"{key} in {path.name}"


@every_document
def test_yaml_blocks_load(path: Path, tmp_path: Path) -> None:
    """Sections of a config load in the place of an example's."""
    for block in code_blocks(path.read_text(), "yaml"):
        config = yaml.safe_load((ROOT / "examples/smollm2_chain_sum.yaml").read_text()) | yaml.safe_load(block)
        config["model"].pop("make", None)
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        load_config(tmp_path / "config.yaml")


def test_the_routes_named_are_the_routes_served() -> None:
    routes = [route for route in make_app(dict, {}, "token").routes if isinstance(route, APIRoute)]
    served = {f"{method} {route.path}" for route in routes for method in route.methods}
    named = set(re.findall(r"`((?:GET|POST) /[\w/{}]*)`", (ROOT / "docs/running.md").read_text()))
    assert named == served


def test_the_config_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    written = runpy.run_path(str(ROOT / "scripts/config_reference.py"))["reference"]()
    assert page == written, "write it again: make docs"
    assert not [key for key, info in FIELDS.items() if section_of(info) is None and f"| `{key}` |" not in page]
