"""What a user gets wrong is said before anything starts, with field, value, reason and next step; nothing is lost."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from local import tiny

from linckia.api.errors import DamagedError, LiveRunError, UserError
from linckia.api.load import fork_sources, load_config
from linckia_trainer import entry
from linckia_trainer.checks import check, check_origin
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.process import this_host, this_start_time
from linckia_trainer.log.records import RecordHeader, encode
from linckia_trainer.log.store import Store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def work(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "attend", lambda *_: pytest.fail("the attempt started"))
    return tmp_path


def train(path: Path, *overrides: str) -> int:
    return entry.train(load_config(path, overrides), str(path), quiet=True)


def refused(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        train(path, *overrides)
    assert caught.value.reason
    assert caught.value.next_step
    return caught.value


def edit(path: Path, section: str, **values: Any) -> Path:
    config = yaml.safe_load(path.read_text())
    config[section].update(values)
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_misspelt_key_names_the_nearest_right_one(work: Path) -> None:
    path = edit(tiny.write_config(work, "bad"), "data", prompt_per_step=4)
    with pytest.raises(UserError, match="prompts_per_step"):
        load_config(path)


def test_a_batch_that_does_not_divide(work: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.mini_batch_size"):
        load_config(tiny.write_config(work, "bad"), ["policy.mini_batch_size=5"])


def test_a_model_folder_without_tokenizer(work: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((work / "model" / "config.json").read_text())
    error = refused(tiny.write_config(work, "bad"), f"model.path={bare}")
    assert error.field == "model.path"
    assert "tokenizer" in error.reason


def test_a_tokenizer_larger_than_the_model(work: Path, tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    assert "embeds 9" in refused(tiny.write_config(work, "bad"), f"model.path={other}").reason


@pytest.mark.parametrize(
    ("lines", "word"), [("", "no prompts"), ('{"prompt": "sort 1="}\n{"prompt"', "jsonl:2"), ('{"p": 1}\n', "jsonl:1")]
)
def test_broken_data(work: Path, lines: str, word: str) -> None:
    path = tiny.write_config(work, "bad")
    (work / "train.jsonl").write_text(lines)
    assert word in str(refused(path))


def test_a_prompt_longer_than_allowed(work: Path) -> None:
    assert "9 tokens" in str(refused(tiny.write_config(work, "bad"), "data.max_prompt_tokens=8"))


def test_a_reward_file_that_does_not_load(work: Path) -> None:
    path = tiny.write_config(work, "bad")
    (work / "reward.py").write_text("def reward(:\n")
    assert refused(path).field == "reward.function"


def test_a_failing_model_maker_is_quoted(work: Path) -> None:
    (work / "maker.py").write_text("def make(path, seed):\n    raise RuntimeError('no weights today')\n")
    error = refused(tiny.write_config(work, "bad"), f"model.make={work}/maker.py:make", "model.path=made")
    assert "no weights today" in error.reason


def test_missing_bucket_credentials(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with socket.socket() as listener:  # a port where nobody answers
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = f"{{endpoint_url: 'http://127.0.0.1:{port}', key: a, secret: b}}"
    error = refused(tiny.write_config(work, "bad"), "run.dir=s3://nowhere/run", f"storage.options={options}")
    assert error.field in ("run.dir", "storage.options")


def begin(work: Path, *overrides: str) -> tuple[Path, Store]:
    """A run directory as a first attempt leaves it, without the cost of one."""
    path = tiny.write_config(work, "begun")
    config = load_config(path, overrides)
    store = Store(config.run.dir)
    store.probe()
    check_origin(store, check(config, lambda _: None))
    return path, store


def test_another_config_is_refused_by_key_and_free_keys_may_change(work: Path) -> None:
    path, store = begin(work)
    error = refused(path, "algorithm.lam=0.5")
    assert "algorithm.lam" in str(error)
    assert "--fork" in error.next_step
    ranks = refused(path, "policy.num_gpus_per_node=1")
    assert "not possible yet" in ranks.reason
    changed = load_config(path, ["rollout.engines=1", "evaluation.every=3", "run.steps=20"])
    check_origin(store, check(changed, lambda _: None))


def test_another_name_for_the_run_in_a_directory_is_refused(work: Path) -> None:
    path, store = begin(work)
    error = refused(path, "run.name=other")
    assert (error.field, error.value) == ("run.name", "other")
    assert "is called begun" in error.reason
    assert "run.name=begun" in error.next_step
    renamed = check(load_config(path, ["run.name=other", f"run.dir={work}/elsewhere"]), lambda _: None)
    origin = json.loads(store.get("origin.json"))["origin"]
    assert check_origin(Store(f"{work}/elsewhere"), renamed) == origin  # and yet a name decides nothing


def test_other_data_under_the_same_name_is_refused(work: Path) -> None:
    path, _ = begin(work)
    tiny.write_data(work / "train.jsonl", 10, first=300)
    assert "data.train" in refused_after_edit(path).field


def refused_after_edit(path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        train(path)
    return caught.value


def test_a_live_run_is_refused_unless_taken_over(work: Path) -> None:
    path, store = begin(work)
    attempts.claim(store, {"host": this_host(), "pid": os.getpid(), "start_time": this_start_time()})
    with pytest.raises(LiveRunError, match="--takeover"):
        train(path)


def test_fresh_moves_nothing_of_a_live_run(work: Path) -> None:
    path, store = begin(work)
    attempts.claim(store, {"host": this_host(), "pid": os.getpid(), "start_time": this_start_time()})
    before = store.list()
    for takeover in (False, True):
        with pytest.raises(LiveRunError, match=r"linckia stop.*--fresh"):
            entry.train(load_config(path), str(path), takeover=takeover, fresh=True, quiet=True)
    assert store.list() == before
    attempts.end(store, 1, "stopped")
    with pytest.raises(pytest.fail.Exception, match="the attempt started"):
        entry.train(load_config(path), str(path), fresh=True, quiet=True)
    assert Store(f"{store.uri}.old-1").list() == [*before[:1], "attempts/1.end", *before[1:]]
    assert attempts.numbers(store) == []


def test_a_finished_run_starts_nothing_and_says_what_was_changed(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = begin(work)
    number = attempts.claim(store, {"host": "elsewhere", "pid": 1, "start_time": 1})
    commit(store, steps=14)
    attempts.end(store, number, "finished")
    assert train(path) == 0
    assert "finished" in capsys.readouterr().out
    assert attempts.numbers(store) == [number]
    assert train(path, "rollout.engines=1", "run.steps=12") == 0  # free keys, and fewer steps than it has done
    changed = refused(path, "algorithm.lam=0.5", "run.seed=8")
    assert changed.field == "algorithm.lam, run.seed"
    assert "algorithm.lam was 0.95 and is 0.5" in changed.reason
    assert "--fork" in changed.next_step
    tiny.write_data(work / "held_out.jsonl", 8, first=300)
    assert refused(path).field == "data.held_out.file"
    assert capsys.readouterr().out.count("is finished") == 1


def fork(path: Path, *overrides: str) -> int:
    config = load_config(path, overrides)
    return entry.train(config, str(path), fork="forked", quiet=True, sources=fork_sources(path, overrides))


def test_a_fork_into_other_shards_is_refused_before_anything_starts(work: Path) -> None:
    path, store = begin(work)
    attempts.claim(store, {"config": load_config(path).model_dump(mode="json")})
    for override, key in (
        ("policy.num_gpus_per_node=1", "policy.num_gpus_per_node"),
        ("critic.zero_stage=3", "critic.zero_stage"),
    ):
        with pytest.raises(UserError, match=rf"^{key}: .*not possible yet.*set {key} back"):
            fork(path, override)
    with pytest.raises(UserError, match=r"--fork.*no step with a whole checkpoint"):  # the same ranks, cut otherwise
        fork(path, "policy.num_nodes=2", "policy.num_gpus_per_node=1")
    assert not (work / "runs" / "forked" / "fork.json").exists()


def test_a_fork_finds_its_source_whatever_seed_is_new(work: Path) -> None:
    path = tiny.write_config(work, "sort")
    edit(path, "run", name="", dir=f"{work}/runs/{{name}}")
    with pytest.raises(UserError, match=r"no run sort-seed9 \(.*\) and sort-seed7 "):
        fork(path, "run.seed=9")
    for seed in (7, 9):
        config = load_config(path, [f"run.seed={seed}"])
        attempts.claim(Store(config.run.dir), {"config": config.model_dump(mode="json")})
        if seed == 7:
            with pytest.raises(UserError, match=r"runs/sort-seed7.*no step with a whole checkpoint"):
                fork(path, "run.seed=9")
    with pytest.raises(UserError, match=r"both sort-seed9 .*and sort-seed7 .*run\.name"):
        fork(path, "run.seed=9")
    with pytest.raises(UserError, match=r"runs/sort-seed9.*no step with a whole checkpoint"):
        fork(path, "run.seed=9", "run.name=sort-seed9")


def test_a_fork_writes_over_no_run(work: Path) -> None:
    path, store = begin(work)
    attempts.claim(store, {"config": load_config(path).model_dump(mode="json")})
    other = Store(str(Path(store.uri).with_name("forked")))
    attempts.claim(other, {})
    before = other.list()
    with pytest.raises(UserError, match=r"--fork = 'forked': there is a run.*run\.name=forked"):
        fork(path)
    assert other.list() == before


def commit(store: Store, steps: int) -> None:
    origin = json.loads(store.get("origin.json"))["origin"]
    log = RunLog(store, origin)
    tiny_arrays = {"tokens": np.zeros((2, 3), np.int32)}
    none = {"count": 0, "mean": 0.0, "m2": 0.0}
    for step in range(1, steps + 1):
        log.commit(step, encode(RecordHeader(step, 0, 0, 2, 0.1, 0.1, none, none), tiny_arrays), attempt=1)


def test_a_damaged_record_stops_the_run_and_names_the_way_out(work: Path) -> None:
    _, store = begin(work)
    commit(store, steps=3)
    file = Path(store.uri, "log", "00000002")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    log = RunLog(store, json.loads(store.get("origin.json"))["origin"])
    with pytest.raises(DamagedError, match=r"checkpoints rewind"):
        log.verify(needed_after=1)
    assert log.verify(needed_after=2) == []  # nobody needs it any more; a deep look still warns
    assert "00000002" in log.verify(needed_after=2, deep=True)[0]


def test_an_occupied_control_port_is_named(work: Path) -> None:
    from linckia_trainer.control.server import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"control\.port"):
            serve(dict, {}, "127.0.0.1", taken.getsockname()[1], "token")


def test_origin_says_what_decides(work: Path) -> None:
    _, store = begin(work)
    found = json.loads(store.get("origin.json"))
    assert "algorithm.lam" in found["deciding"]
    assert "rollout.engines" not in found["deciding"]
    assert {"model.path", "data.train", "reward.function"} <= set(found["content"])
    assert canonical_json(found) == store.get("origin.json")
