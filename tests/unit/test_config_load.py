import pytest

from linckia.api.config import parse_memory
from linckia.api.errors import UserError
from linckia.api.explain import nearest_key, walk_fields
from linckia.api.load import content_paths, deciding_values, default_run_name, load_config, refuse_changes

CONFIG = """\
model:
  path: models/tiny
  make: build.py:make
data:
  train:
    file: prompts.jsonl
reward:
  function: score.py:score
policy:
  optimizer:
    lr: 1e-4
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A config with its files in configs/, and another current directory."""
    configs = tmp_path / "configs"
    configs.mkdir()
    for name in ("build.py", "prompts.jsonl", "score.py"):
        (configs / name).write_text("")
    (configs / "sort.yaml").write_text(CONFIG)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return configs


def load(folder, *overrides):
    return load_config(folder / "sort.yaml", overrides)


def load_text(folder, text):
    (folder / "other.yaml").write_text(text)
    return load_config(folder / "other.yaml")


def test_name_and_directory_are_filled(folder):
    config = load(folder, "run.seed=7")
    assert (config.run.name, config.run.dir) == ("sort-seed7", "runs/sort-seed7")
    config = load(folder, "run.name=mine", "run.dir=s3://bucket/{name}/x")
    assert config.run.dir == "s3://bucket/mine/x"


def test_default_name_holds_only_what_a_name_may(tmp_path):
    assert default_run_name(tmp_path / "my first run!.yaml", 1) == "my-first-run--seed1"
    assert default_run_name(tmp_path / "....yaml", 2) == "run-seed2"


def test_paths_beside_the_config_are_found_and_those_here_come_first(folder, tmp_path):
    assert load(folder).data.train.file == str(folder / "prompts.jsonl")
    here = tmp_path / "here" / "prompts.jsonl"
    here.write_text("")
    config = load(folder)
    assert config.data.train.file == str(here)
    assert config.reward.function == f"{folder / 'score.py'}:score"
    assert config.model.path == str(tmp_path / "here" / "models" / "tiny")  # model.make will write it


def test_hub_names_and_uris_stay(folder):
    config = load(folder, "model.make=null", "model.path=some/model", "data.train.file=s3://bucket/p.jsonl")
    assert (config.model.path, config.data.train.file) == ("some/model", "s3://bucket/p.jsonl")


def test_yaml_12_numbers_and_values_on_the_command_line(folder):
    assert load(folder).policy.optimizer.lr == 1e-4
    config = load(folder, "policy.optimizer.betas=[0.8, 0.9]", "rollout.stop=['\\n', end]", "evaluation.score=exact")
    assert config.policy.optimizer.betas == (0.8, 0.9)
    assert config.evaluation.score == "exact"


def test_a_partly_given_section_keeps_its_own_defaults(folder):
    config = load(folder, "critic.zero_stage=3", "storage.run_directory.every=5")
    assert config.critic.optimizer.lr == 1e-5
    assert config.storage.run_directory.keep == 3


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("run.stepps=4", "run.stepps", ["nearest is run.steps", "command line"]),
        ("policy.lr=3", "policy.lr", ["policy.optimizer.lr"]),
        ("polciy.zero_stage=2", "polciy", ["nearest is policy"]),
        ("zzz.qqq=1", "zzz", ["no such key", "the keys of a config are run, model"]),
        ("run.steps=1.5", "run.steps", ["whole number", "number with a fraction"]),
        ("run.steps='3'", "run.steps", ["whole number", "this is text"]),
        ("run.seed=true", "run.seed", ["whole number", "true or false"]),
        ("run.name=5", "run.name", ["must be text", "quotes"]),
        ("run.name=a/b", "run.name", ["letters, digits"]),
        ("run.dir='{nmae}'", "run.dir", ["only {name} may stand in braces"]),
        ("rollout.transfer=gloe", "rollout.transfer", ["one of", "nearest is 'gloo'"]),
        ("policy.zero_stage=1", "policy.zero_stage", ["one of 0, 2 or 3"]),
        ("policy.optimizer.lr=.inf", "policy.optimizer.lr", ["finite"]),
        ("policy.optimizer.lr=0", "policy.optimizer.lr", ["greater than 0"]),
        ("algorithm.gamma=2", "algorithm.gamma", ["at most 1"]),
        ("policy.resources.memory=lots", "policy.resources.memory", ["16GB"]),
        ("reward.function=score", "reward.function", ["file.py:function"]),
        ("reward.function=nowhere.py:f", "reward.function", ["no file nowhere.py"]),
        ("data.train.file=gone.jsonl", "data.train.file", ["no file gone.jsonl", "command line"]),
        ("data.train.reasoning_gym.task=x", "data.train", ["exactly one of file and reasoning_gym"]),
        ("data=3", "data", ["section", "whole number"]),
        ("model.path=", "model.path", ["must be text", "empty"]),
        ("policy.mini_batch_size=5", "policy.mini_batch_size", ["does not divide the 32 rows"]),
        ("recovery.hang_floor_seconds=10", "recovery.hang_floor_seconds", ["looks every 5 s", "15 or more"]),
        ("recovery.watch_seconds=400", "recovery.hang_floor_seconds", ["looks every 400 s"]),
        ("recovery.orphan_timeout=12", "recovery.watch_seconds", ["12 s (recovery.orphan_timeout)", "4 or less"]),
        ("recovery={replace_stragglers: true, watcher: off}", "recovery.replace_stragglers", ["nobody looks"]),
        ("run.steps=[1", "run.steps=[1", ["not YAML"]),
        ("run.steps", "override", ["section.key=value"]),
        ("=3", "override", ["section.key=value"]),
        ("model.make.x=3", "model.make.x", ["no keys"]),
    ],
)
def test_mistakes_on_the_command_line(folder, override, field, words):
    with pytest.raises(UserError) as caught:
        load(folder, override)
    assert caught.value.field == field
    assert caught.value.next_step
    for word in words:
        assert word in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (CONFIG + "run:\n  seed: x\n", "run.seed", ["other.yaml, line 13", "this is text"]),
        (CONFIG + "run:\n  seed: 1\n  seed: 2\n", "run.seed", ["stands twice, on lines 13 and 14"]),
        (
            CONFIG.replace("  path: models/tiny\n", ""),
            "model.path",
            ["missing", "other.yaml, line 1", "add model.path"],
        ),
        (CONFIG.replace("reward:", "rewrad:"), "rewrad", ["nearest is reward", "1 more"]),
        (CONFIG.replace("lr:", "lr: :"), None, ["line 11", "not YAML"]),
        ("- a\n", None, ["holds a list"]),
        ("", "model", ["missing"]),
    ],
)
def test_mistakes_in_the_file(folder, text, field, words):
    with pytest.raises(UserError) as caught:
        load_text(folder, text)
    assert field is None or caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        load_config(tmp_path / "bytes.yaml")


def test_every_key_has_a_description_and_is_its_own_nearest():
    for key, info in walk_fields():
        assert info.description, key
        assert nearest_key(key) == key


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("16GiB", 16 << 30), ("1.5Gi", 3 << 29), ("512", 512)]
)
def test_memory(text, size):
    assert parse_memory(text) == size


# ---- what decides ------------------------------------------------------------------------------------------------


def test_moved_files_and_free_keys_decide_nothing(folder, tmp_path):
    before = load(folder)
    for name in ("prompts.jsonl", "score.py", "build.py"):
        (tmp_path / "here" / name).write_text("")
    after = load(folder, "run.steps=9", "rollout.engines=2", "placement.colocation=all", "storage.node_memory=null")
    assert deciding_values(before) == deciding_values(after)
    assert not {"model.path", "model.make", "data.train.file"} & deciding_values(before).keys()
    assert deciding_values(before)["reward.function"] == "score"
    assert content_paths(before).keys() == {"data.train.file", "model.path", "reward.function"}
    refuse_changes(deciding_values(before), deciding_values(after))


def test_steps_decide_only_where_a_schedule_ends_with_them(folder):
    def decay(*overrides):
        return deciding_values(load(folder, *overrides))["policy.optimizer.decay_steps"]

    assert decay("run.steps=9") is None
    assert decay("run.steps=9", "policy.optimizer.schedule=linear") == 9
    assert decay("run.steps=9", "policy.optimizer.schedule=linear", "policy.optimizer.decay_steps=5") == 5


def test_hub_names_decide(folder):
    values = deciding_values(load(folder, "model.make=null", "model.path=some/model"))
    assert values["model.path"] == "some/model"


def test_changes_are_refused_with_both_values(folder):
    old = deciding_values(load(folder))
    new = deciding_values(load(folder, "policy.zero_stage=3", "run.seed=1"))
    with pytest.raises(UserError) as caught:
        refuse_changes(old, new)
    text = str(caught.value)
    assert caught.value.field == "policy.zero_stage, run.seed"
    assert "policy.zero_stage was 2 and is 3" in text
    assert "run.seed was 0 and is 1" in text
    assert "converted" in text
    assert "--fork NAME" in text
    with pytest.raises(UserError) as caught:
        refuse_changes(old, {**old, "policy.num_nodes": 2})
    assert "--fork" not in str(caught.value)
    with pytest.raises(UserError, match=r"data\.train\.content was not there and is"):
        refuse_changes(old, {**old, "data.train.content": "abc"})
