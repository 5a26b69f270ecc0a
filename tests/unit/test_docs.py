"""What the documents point at exists: files, images, commands, options, config keys."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from linckia.api.config import RunConfig
from linckia.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_and_images_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{target} in {path.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_files_named_in_code_style_exist(path: Path) -> None:
    for name in re.findall(
        r"`((?:examples|tests|benchmarks|docs|operator|trainer|scripts)/[\w./-]+)`", path.read_text()
    ):
        assert (ROOT / name).exists(), f"{name} in {path.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_commands_and_options_exist(path: Path) -> None:
    root = typer.main.get_command(app)
    for line in re.findall(r"linckia ((?:train|plan|status|checkpoints|samples|stop)\b[^`\n#|]*)", path.read_text()):
        command: Any = root
        words = line.split()
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        if hasattr(command, "commands"):  # `linckia checkpoints RUN --json` is its list
            options |= {"--json"}
        used = {word.strip("[],.:;)") for word in words if word.startswith("--")}
        assert used <= options, f"{used - options} in {line!r} of {path.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_yaml_blocks_hold_real_keys(path: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        for section, values in yaml.safe_load(block).items():
            fields = RunConfig.model_fields[section].annotation
            assert fields is not None
            assert set(values) <= set(fields.model_fields), f"{section} in {path.name}"
