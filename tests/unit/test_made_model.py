"""A made model goes through the run directory to nodes that lack it."""

import shutil
from pathlib import Path

from unit.fakes import config_of

from linckia.api.config import RunConfig
from linckia_trainer.checks import make_model
from linckia_trainer.log.store import Store
from linckia_trainer.made_model import fetch_model, keep_model

MAKE = """\
from pathlib import Path


def make(path, seed):
    folder = Path(path)
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 100)
    (folder / "inner" / "config.json").write_text("{}")
"""


def run(tmp_path: Path) -> tuple[RunConfig, Store]:
    (tmp_path / "make.py").write_text(MAKE)
    made = (f"model.make={tmp_path}/make.py:make", f"model.path={tmp_path}/models", f"run.dir={tmp_path}/run")
    return config_of(tmp_path, *made), Store(str(tmp_path / "run"))


def test_a_node_without_the_model_gets_the_bytes_of_the_one_that_made_it(tmp_path: Path) -> None:
    config, store = run(tmp_path)
    config = make_model(config, lambda _: None)
    folder = Path(config.model.path)
    (folder / "weights").write_bytes(b"as this machine made it")  # another would make other bytes
    keep_model(config, store)
    shutil.rmtree(folder)
    fetch_model(config)
    assert (folder / "weights").read_bytes() == b"as this machine made it"
    assert (folder / "inner" / "config.json").read_text() == "{}"
    assert not folder.with_suffix(".partial").exists()


def test_a_later_start_elsewhere_takes_the_kept_model_and_makes_none(tmp_path: Path) -> None:
    config, store = run(tmp_path)
    made = make_model(config, lambda _: None, store)
    keep_model(made, store)
    shutil.rmtree(tmp_path / "models")
    said: list[str] = []
    assert make_model(config, said.append, store).model.path == made.model.path
    assert said == []
    assert Path(made.model.path, "weights").stat().st_size == 25600


def test_a_model_that_is_there_is_neither_fetched_nor_kept_twice(tmp_path: Path) -> None:
    config, store = run(tmp_path)
    config = make_model(config, lambda _: None, store)
    keep_model(config, store)
    [kept] = store.list("made")
    before = store.get(kept)
    Path(config.model.path, "weights").write_bytes(b"here")
    fetch_model(config)
    keep_model(config, store)
    assert Path(config.model.path, "weights").read_bytes() == b"here"
    assert store.get(kept) == before


def test_a_model_that_nobody_makes_is_left_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    store = Store(str(tmp_path / "run"))
    keep_model(config, store)
    fetch_model(config)
    assert store.list() == []
