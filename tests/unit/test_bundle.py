"""A config and its files packed into one text, and found again on another machine."""

import base64
import gzip
import json
import random
from pathlib import Path

import pytest

from linckia.api.bundle import MAX_BYTES, Bundle, unpack, unpack_here
from linckia.api.bundle_files import gather
from linckia.api.errors import UserError
from linckia.api.load import load_config
from linckia.api.names import BUNDLE_VARIABLE

CONFIG = """\
run: {name: sort, dir: "s3://bucket/{name}"}
model: {path: models/tiny, make: code/make.py:make}
data: {train: {file: prompts.jsonl}}
reward: {function: code/score.py:score}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and its code, as the current one; temporary files go beside it."""
    folder = tmp_path / "here"
    (folder / "code" / "parts").mkdir(parents=True)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "prompts.jsonl").write_text('{"prompt": "ü"}\n')
    (folder / "code" / "make.py").write_text("import torch\n")
    (folder / "code" / "score.py").write_text("import json\nimport helper\nfrom parts.one import thing\n")
    (folder / "code" / "helper.py").write_text("def help():\n    from deeper import x\n")
    (folder / "code" / "deeper.py").write_text("import helper\n")
    (folder / "code" / "unused.py").write_text("")
    (folder / "code" / "parts" / "__init__.py").write_text("")
    (folder / "code" / "parts" / "one.py").write_text("thing = 1\n")
    monkeypatch.chdir(folder)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return folder


def gathered(path: str, *overrides: str) -> tuple[Bundle, list[str]]:
    return gather(Path(path), overrides, load_config(path, overrides, elsewhere=True), Path.cwd())


def test_a_config_takes_its_code_what_that_imports_and_its_prompts_along(here: Path) -> None:
    bundle, further = gathered("run.yaml")
    code = {"make.py", "score.py", "helper.py", "deeper.py", "parts/__init__.py", "parts/one.py"}
    assert set(bundle.files) == {"run.yaml", "prompts.jsonl", *(f"code/{name}" for name in code)}
    assert further == []  # all lie where the config says, seen from the bundle's folder


def test_the_bundle_loads_elsewhere_as_it_did_here(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config("run.yaml")
    bundle, _ = gathered("run.yaml")
    environment = {BUNDLE_VARIABLE: bundle.pack()}
    found = unpack_here(environment)
    assert found is not None
    folder, config = found
    assert folder.parent == tmp_path / "temporary"
    monkeypatch.chdir(folder)
    again = load_config(config)
    assert again.reward.function == str(folder / "code" / "score.py") + ":score"
    assert Path(str(again.data.train.file)).read_text() == '{"prompt": "ü"}\n'
    assert again.model.path == str(folder / "models" / "tiny")
    assert again.run == loaded.run


def test_a_second_unpacking_mends_what_was_changed_and_leaves_the_rest(here: Path) -> None:
    environment = {BUNDLE_VARIABLE: gathered("run.yaml")[0].pack()}
    found = unpack_here(environment)
    assert found is not None
    folder, config = found
    config.write_text("broken")
    kept = (folder / "prompts.jsonl").stat().st_ino
    assert unpack_here(environment) == found
    assert config.read_text() == CONFIG
    assert (folder / "prompts.jsonl").stat().st_ino == kept
    assert not list(folder.rglob("tmp*"))


def test_without_a_bundle_there_is_nothing_to_do() -> None:
    assert unpack_here({}) is None


def test_files_from_elsewhere_get_a_place_and_an_override(here: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "score.py").write_text("import near\n")
    (outside / "near.py").write_text("")
    bundle, further = gathered(
        "run.yaml", f"reward.function={outside}/score.py:score", f"data.train.file={here}/prompts.jsonl"
    )
    assert {"files/outside/score.py", "files/outside/near.py"} < set(bundle.files)
    assert further == ["data.train.file=prompts.jsonl", "reward.function=files/outside/score.py:score"]


def test_files_that_only_the_cluster_has_stay_there(here: Path) -> None:
    bundle, further = gathered("run.yaml", "data.train.file=/volume/prompts.jsonl", "model.path=/volume/model")
    assert "prompts.jsonl" not in bundle.files
    assert further == []
    with pytest.raises(UserError) as caught:
        gathered("run.yaml", "data.train.file=not_here.jsonl")
    assert caught.value.field == "data.train.file"


def test_a_model_folder_of_this_machine_is_refused(here: Path) -> None:
    (here / "models" / "tiny").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        gathered("run.yaml", "model.make=null")
    assert caught.value.field == "model.path"
    assert "volume" in caught.value.next_step


def test_what_is_too_large_is_named(here: Path) -> None:
    noise = random.Random(0).randbytes(MAX_BYTES).hex()
    (here / "prompts.jsonl").write_text(noise)
    with pytest.raises(UserError) as caught:
        gathered("run.yaml")[0].pack()
    assert caught.value.field == "prompts.jsonl"
    assert "volume" in caught.value.next_step


def test_code_that_is_no_python_is_named(here: Path) -> None:
    (here / "code" / "score.py").write_text("def score(:\n")
    with pytest.raises(UserError) as caught:
        gathered("run.yaml")
    assert caught.value.field.endswith("score.py")


def packed(config: object, files: object) -> str:
    return base64.b64encode(gzip.compress(json.dumps({"config": config, "files": files}).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "no letters!",
        base64.b64encode(b"no gzip").decode(),
        base64.b64encode(gzip.compress(b"no json")).decode(),
        packed("a.yaml", []),
        packed("a.yaml", {}),
        packed("a.yaml", {"a.yaml": "", "../outside.py": ""}),
        packed("/a.yaml", {"/a.yaml": ""}),
    ],
)
def test_what_is_no_bundle_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        unpack(text)
    assert caught.value.field == BUNDLE_VARIABLE


def test_the_same_files_make_the_same_folder_and_others_another() -> None:
    one = Bundle("a", {"a": "1", "b": "2"})
    assert one.digest == Bundle("a", {"b": "2", "a": "1"}).digest == unpack(one.pack()).digest
    assert one.digest != Bundle("a", {"a": "1", "b": "3"}).digest
