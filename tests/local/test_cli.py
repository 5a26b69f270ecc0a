import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from unit.log_builders import EMPTY, ORIGIN, flip, save_state

import linckia_trainer.control.server as control
from linckia.api.config import RunConfig
from linckia.api.errors import FencedError, UserError
from linckia.cli import chaos, runs, trainer
from linckia.cli import main as cli
from linckia.faults import inject
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog, record_key
from linckia_trainer.log.process import this_host, this_start_time
from linckia_trainer.log.records import RecordHeader, encode
from linckia_trainer.log.recoveries import Recovery, note_recovery
from linckia_trainer.log.store import Store
from linckia_trainer.metrics import names
from linckia_trainer.metrics.sinks import FILE, read_rows
from linckia_trainer.metrics.summary import summarize, write_summary
from linckia_trainer.state.tiers import node_memory

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")
CONFIG = """\
model: {path: models/tiny, make: build.py:make}
data: {train: {reasoning_gym: {task: chain_sum}}}
reward: {verifier: true}
"""


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["linckia", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code or 0
        printed = capsys.readouterr()
        return code, re.sub(r"\x1b\[[0-9;]*m", "", printed.out), re.sub(r"\x1b\[[0-9;]*m", "", printed.err)

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LINCKIA_TOKEN", "secret")
    (tmp_path / "build.py").write_text("")
    (tmp_path / "sort.yaml").write_text(CONFIG)
    return tmp_path


class Tokenizer:
    """Token n is the letter n; 0 ends an answer."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(token) if token else "" if skip_special_tokens else "<end>" for token in tokens)


def repeated_record(step):
    """A record that holds the trajectories of the step before once more."""
    return record_of(step, positions=step - 1)


def record_of(step, positions=None):
    texts = [("ab=", "cd"), ("[bold]b=", "c")]
    tokens = np.zeros((2, 12), np.int32)
    for row, (prompt, answer) in enumerate(texts):
        tokens[row, : len(prompt + answer)] = [ord(letter) for letter in prompt + answer]
    arrays = {
        "tokens": tokens,
        "prompt_lengths": np.array([3, 8], np.int32),
        "lengths": np.array([6, 9], np.int32),
        "rewards": np.array([1.0, 0.25], np.float32),
        "reward_parts": np.array([[1.0], [0.25]], np.float32),
        "finished": np.array([1, 0], np.uint8),
        "positions": np.array([positions or step] * 2, np.int64),
        "samples": np.array([0, 1], np.int32),
    }
    header = RecordHeader(step, 0, step, step + 1, 0.1, 0.1, EMPTY, EMPTY, ("exact",))
    return encode(header, arrays)


@pytest.fixture
def sorted_run(here):
    """A run of four steps, with states of policy and critic at 2 and 4 and a local folder, as its controller leaves it."""
    from linckia.api.load import load_config

    config = load_config("sort.yaml", ["run.seed=1", f"storage.node_memory_dir={here}/shm"])
    folder = here / "runs" / config.run.name
    store = Store(str(folder))
    killed = {"host": this_host(), "pid": 1, "start_time": -1}
    attempts.claim(store, {**killed, "config": config.model_dump(mode="json")})
    log = RunLog(store, ORIGIN)
    for step in (1, 2, 3, 4):
        log.commit(step, record_of(step), attempt=1)
    for step in (2, 4):
        for group in ("policy", "critic"):
            save_state(store, log, group, step, run=config.run.name)
    run_file = {
        "name": config.run.name, "uri": str(folder), "options": {}, "attempt": 1, "api_address": "", "host": "elsewhere",
        "pid": 1, "config": "sort.yaml", "started": time.time() - 600,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run_file))
    rows = [{"step": 0, "attempt": 1, names.EVALUATION_SCORE: 0.1}]
    rows += [{"step": step, "attempt": 1, names.REWARD: step / 10} for step in (1, 2, 3, 4)]
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finish(folder, outcome="finished"):
    attempts.end(Store(str(folder)), 1, outcome, "the cause")
    write_summary(folder, summarize(read_rows(folder), folder.name, str(folder), outcome))


def serve_view(folder, view, asked=None):
    actions = {"stop": lambda: asked.append("stop")}
    server = control.serve(lambda: view, actions, "127.0.0.1", 0, "secret")
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "api_address": server.address}))
    return server


# ---- what is imported when ---------------------------------------------------------------------------------------


def modules_after(folder, *commands, before=""):
    """(exit codes, top-level modules then loaded, stderr) of commands that run in one fresh process."""
    code = f"""
import json, sys
{before}
from linckia.cli.main import main
codes = []
for arguments in {commands!r}:
    sys.argv = ["linckia", *arguments]
    try:
        main()
    except SystemExit as stopped:
        codes.append(stopped.code)
print(json.dumps([codes, sorted(sys.modules)]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    codes, modules = json.loads(done.stderr.splitlines()[-1])
    return codes, {module.partition(".")[0] for module in modules}, done.stderr


def test_help_loads_next_to_nothing(here):
    codes, modules, _ = modules_after(here, ("--help",))
    assert codes == [0]
    assert not modules & {*HEAVY, "pydantic", "httpx", "numpy", "fsspec", "linckia_trainer"}


def test_mistakes_are_found_before_anything_heavy_is_loaded(here):
    codes, modules, said = modules_after(here, ("train", "sort.yaml", "run.stepps=1"), ("train", "--nonsense"))
    assert codes == [2, 2]
    assert "nearest is run.steps" in said
    assert not modules & {*HEAVY, "linckia_trainer"}


def test_the_data_plane_is_reached_with_nothing_heavy_loaded(here):
    before = f"""
import types
entry = types.ModuleType("linckia_trainer.entry")
def train(config, config_path, address, takeover, fork, fresh, quiet, sources):
    assert not set({HEAVY!r}) & set(sys.modules), "loaded before arguments and config were checked"
    assert (config.run.seed, config_path, address, takeover, fork, fresh, quiet) == (
        2, "sort.yaml", "auto", True, "other", False, True)
    assert [one.run.name for one in sources] == ["sort-seed2", "sort-seed0"]
    return 7
entry.train = train
sys.modules["linckia_trainer.entry"] = entry
import linckia_trainer
linckia_trainer.entry = entry
"""
    arguments = ("train", "sort.yaml", "run.seed=2", "--address", "auto", "--takeover", "--fork", "other", "--quiet")
    codes, modules, _ = modules_after(here, arguments, before=before)
    assert codes == [7]
    assert "linckia_trainer" in modules


def test_looking_at_a_run_loads_no_torch(sorted_run):
    name = sorted_run.name
    commands = (("status", name), ("checkpoints", name), ("checkpoints", "verify", name), ("plan", "sort.yaml"))
    codes, modules, said = modules_after(sorted_run.parent.parent, *commands)
    assert codes == [0, 0, 0, 0], said
    assert not modules & set(HEAVY)


# ---- the command itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["", "train", "plan", "status", "samples", "stop", "checkpoints", "checkpoints list", "checkpoints verify",
     "checkpoints prune", "checkpoints export", "checkpoints rewind", "chaos", "watch"],
)  # fmt: skip
def test_help_everywhere(call, command):
    code, out, _ = call(*command.split(), "--help")
    assert code == 0
    assert "Usage" in out
    options = re.findall(r"^│[ *]+(--[a-z-]+) +(.*)│$", out, re.MULTILINE)
    assert "--help" in [name for name, _ in options]
    for option in options:
        assert len(option[1].split()) > 2, option  # each option says what it is for


def test_errors_are_clean_and_exit_codes_tell_them_apart(call, here, monkeypatch):
    code, out, err = call("train", "nowhere.yaml")
    assert (code, out) == (2, "")
    assert err == "error: CONFIG = 'nowhere.yaml': there is no such file. Next: give the path of a run config (YAML).\n"
    entry = types.ModuleType("linckia_trainer.entry")

    def fenced(*arguments):
        raise FencedError("attempt 2 has taken over")

    entry.train = fenced
    monkeypatch.setitem(sys.modules, "linckia_trainer.entry", entry)
    monkeypatch.setattr("linckia_trainer.entry", entry, raising=False)
    assert call("train", "sort.yaml")[::2] == (4, "error: attempt 2 has taken over\n")
    assert call("train", "sort.yaml", "--nonsense")[0] == 2
    assert "--fork or --fresh" in call("train", "sort.yaml", "--fork", "a", "--fresh")[2]
    assert "letters, digits" in call("train", "sort.yaml", "--fork", "a/b")[2]
    assert "placement.colocation" in call(
        "train", "sort.yaml", "placement.colocation=policy_reference", "reference.num_gpus_per_node=2"
    )[2]  # fmt: skip


def test_version(call):
    assert call("--version")[:2] == (0, f"linckia {version('linckia')}\n")


def test_plan(call, here):
    code, out, _ = call("plan", "sort.yaml", "rollout.engines=2", "--gpus")
    assert code == 0
    assert "rollout-1" in out
    assert "In all: 5 GPU, 6 CPU" in out
    data = json.loads(call("plan", "sort.yaml", "--cpu", "--json")[1])
    assert data["totals"] == {"CPU": 5.0}


# ---- finding runs ------------------------------------------------------------------------------------------------


def test_runs_are_found_by_name_folder_and_uri(sorted_run, here):
    name = sorted_run.name
    by_name = runs.find_run(name)
    assert (by_name.name, by_name.uri) == (name, str(sorted_run))
    assert runs.find_run(str(sorted_run)).uri == str(sorted_run)
    assert runs.find_run("s3://bucket/other") == runs.RunPlace("other", "s3://bucket/other", {}, None, None)
    (sorted_run / "run.json").rename(here / "run.json")
    bare = runs.find_run(f"runs/{name}")
    assert (bare.name, bare.uri, bare.file) == (name, str(sorted_run), None)


def test_a_uri_whose_local_folder_is_here(sorted_run):
    path = sorted_run / "run.json"
    uri = f"s3://bucket/{sorted_run.name}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "uri": uri, "options": {"key": "k"}}))
    place = runs.find_run(uri + "/")
    assert (place.uri, place.options, place.folder) == (uri, {"key": "k"}, Path("runs") / sorted_run.name)


def test_a_moved_folder_is_its_own_run_directory(sorted_run, here):
    moved = sorted_run.rename(here / "moved")
    assert runs.find_run("moved").uri == str(moved)


def test_no_such_run(call, sorted_run):
    code, _, err = call("status", "sort-seed2")
    assert code == 2
    assert "the nearest in runs/ is sort-seed1" in err


# ---- status, stop ------------------------------------------------------------------------------------------------


def test_status_of_an_interrupted_a_failed_and_a_finished_run(call, sorted_run):
    name = sorted_run.name
    code, out, _ = call("status", name)
    assert code == 0
    for words in ("interrupted, attempt 1", "step            4 of 100; the log has 4 records", "reward          0.400"):
        assert words in out
    finish(sorted_run, "failed")
    assert "failed, attempt 1: the cause" in call("status", name)[1]
    found = json.loads(call("status", name, "--json")[1])
    assert (found["state"], found["live"], found["log_head"]) == ("failed", None, 4)
    assert found["summary"]["eval_before"] == 0.1
    [brief] = json.loads(call("status", "--json")[1])
    assert (brief["name"], brief["state"], brief["step"], brief["held_out_score"]) == (name, "failed", 4, 0.1)
    assert 590 < brief["age_seconds"] < 700


def test_status_lists_runs(call, here, sorted_run):
    assert "interrupted" in call("status")[1]
    finish(sorted_run)
    code, out, _ = call("status")
    assert code == 0
    assert re.search(r"sort-seed1\s+finished\s+4\s+0\.100\s+10 min ago", out)
    sorted_run.rename(here / "elsewhere")
    assert "there is no run" in call("status")[1]


def test_status_of_a_live_run(call, sorted_run):
    view = {
        "run": sorted_run.name, "step": 5, "stage": "update", "attempt": 2, "seconds_left": 300.0,
        "metrics": {names.REWARD: 0.75}, "warnings": ["a [warning]"],
        "groups": {"policy": {"generation": 3, "members": [{}, {}]}, "critic": {"generation": 1, "members": [{}]}},
    }  # fmt: skip
    server = serve_view(sorted_run, view)
    try:
        code, out, _ = call("status", sorted_run.name)
        found = json.loads(call("status", sorted_run.name, "--json")[1])
        assert json.loads(call("status", "--json")[1])[0]["state"] == "live"
    finally:
        server.close()
    assert code == 0
    for words in (
        "live, attempt 2",
        "5 of 100, update",
        "5 min",
        "0.750",
        "generation 3, 2 members",
        "generation 1, 1 member ",
        "a [warning]",
    ):
        assert words in out
    assert found["live"] == {"api_version": 1, **view}


def test_status_tells_of_recoveries_and_of_what_is_being_replaced(call, sorted_run):
    note_recovery(Store(str(sorted_run)), 1, recovery())
    group = {"generation": 3, "members": [{}], "returning": True, "restarts_left": 2, "standbys": 1}
    ratios = [
        {"name": "x", "labels": {"replay": "useful"}, "value": 0.9},
        {"name": "x", "labels": {"replay": "lost"}, "value": 0.8},
    ]
    server = serve_view(sorted_run, {"run": sorted_run.name, "groups": {"policy": group}, "recovery_metrics": ratios})
    try:
        _, out, _ = call("status", sorted_run.name)
        found = json.loads(call("status", sorted_run.name, "--json")[1])
    finally:
        server.close()
    assert "generation 3, 1 member, 1 standby, is being replaced; 2 restarts left in this step" in out
    assert re.search(
        r"policy 1 -> 2, step 4 update, death \(it died\), \d+ s ago: 2\.5 s \(load 2\.0, start 0\.5\)", out
    )
    assert "90.0% of this attempt; 80.0% if replayed records count as lost" in out
    assert found["recoveries"][0]["group"] == "policy"


def test_watch_looks_again_until_the_run_has_ended(call, sorted_run):
    looked = []
    server = serve_view(sorted_run, {"run": sorted_run.name, "step": 2})

    def view(place, timeout=3.0):
        looked.append(place.name)
        return {"run": sorted_run.name, "step": 2} if len(looked) < 3 else None

    server.close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("linckia.cli.client.get_view", view)
        code, out, _ = call("watch", sorted_run.name, "--every", "0.1")
    assert (code, len(looked)) == (0, 3)
    assert "interrupted" in out


def recovery(**changed):
    seconds = {"start": 0.5, "load": 2.0}
    found = Recovery("policy", "policy", 1, 2, "death", "it died", 4, "update", 1, time.time() + 0.5, 2.5, seconds)
    return replace(found, **changed)


# ---- chaos -------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(sorted_run, monkeypatch):
    """A run whose policy is healed at once by the next generation; and the signals that were sent to it."""
    store = Store(str(sorted_run))
    log_hash = RunLog(store, ORIGIN).log_hash(4)

    def member(generation):
        processes = [{"pid": 4711, "start_time": 7}]
        return {
            "rank": 0, "generation": generation, "pid": 4711, "processes": processes, "applied_step": 4, "log_hash": log_hash,
        }  # fmt: skip

    policy = {"generation": 1, "returning": False, "members": [member(1)]}
    view = {"run": sorted_run.name, "attempt": 1, "step": 4, "stage": "update", "groups": {"policy": policy}}
    sent = []

    def kill(pid, number):
        sent.append((pid, number))
        policy.update(generation=2, members=[member(2)])
        note_recovery(store, 1, recovery())

    monkeypatch.setattr(inject, "start_time", lambda pid: 7)
    monkeypatch.setattr(inject.os, "kill", kill)
    monkeypatch.setattr(chaos, "AGREE_SECONDS", 0.1)
    server = serve_view(sorted_run, view)
    yield view, sent
    server.close()


def test_chaos_strikes_and_reports_what_it_cost(call, sorted_run, live):
    code, out, err = call(
        "chaos", sorted_run.name, "--fault", "kill", "--target", "policy", "--stage", "update", "--at", "3"
    )
    assert (code, err) == (0, "")
    assert live[1] == [(4711, signal.SIGKILL)]
    for words in (
        "struck policy/0 (process 4711) in step 4, update",
        "cause         it died",
        "load 2.00 s",
        "healed; every",
    ):
        assert words in out


def test_chaos_as_json(call, sorted_run, live):
    code, out, _ = call("chaos", sorted_run.name, "--fault", "exit", "--target", "policy/0", "--json")
    found = json.loads(out)
    assert (code, found["healed"], found["problems"], found["generation"]) == (0, True, [], 1)
    assert live[1] == [(4711, signal.SIGTERM)]
    assert 0 < found["found_after_seconds"] < 5
    assert found["healed_after_seconds"] == pytest.approx(found["found_after_seconds"] + 2.5)
    assert found["seconds_by_part"] == {"start": 0.5, "load": 2.0}


def test_chaos_fails_where_members_and_log_disagree(call, sorted_run, live):
    live[0]["groups"]["critic"] = {
        "generation": 1, "members": [{"rank": 0, "generation": 1, "pid": 1, "applied_step": 4, "log_hash": "another"}],
    }  # fmt: skip
    code, out, _ = call("chaos", sorted_run.name, "--fault", "kill", "--target", "policy", "--json")
    assert code == 1
    [problem] = json.loads(out)["problems"]
    assert "critic stands at step 4 of another history" in problem


def test_chaos_fails_where_a_trajectory_is_recorded_twice(call, sorted_run, live):
    RunLog(Store(str(sorted_run)), ORIGIN).commit(5, repeated_record(5), attempt=1)
    code, out, _ = call("chaos", sorted_run.name, "--fault", "kill", "--target", "policy", "--json")
    assert code == 1
    assert json.loads(out)["problems"] == ["trajectory 4, 0 is recorded twice", "trajectory 4, 1 is recorded twice"]


def test_chaos_fails_where_nothing_is_healed(call, sorted_run, live, monkeypatch):
    monkeypatch.setattr(inject.os, "kill", lambda pid, number: None)
    code, out, _ = call("chaos", sorted_run.name, "--fault", "hang", "--target", "policy", "--timeout", "1")
    assert code == 1
    assert "it was not seen healed within 1 s" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "RUN"),
        (("{run}",), "--fault: is missing"),
        (("{run}", "--fault", "kil", "--target", "policy"), "there are kill, exit"),
        (("{run}", "--fault", "kill"), "this fault takes policy/0"),
        (("{run}", "--fault", "kill", "--target", "policy/3"), "this fault takes policy/0"),
        (("elsewhere", "--fault", "kill", "--target", "policy"), "there is no such run"),
    ],
)
def test_chaos_refuses_what_does_not_exist(call, sorted_run, live, arguments, words):
    code, out, err = call("chaos", *(one.format(run=sorted_run.name) for one in arguments))
    assert (code, out) == (2, "")
    assert words in err
    assert live[1] == []


def test_chaos_wants_a_live_run(call, sorted_run):
    code, _, err = call("chaos", sorted_run.name, "--fault", "kill", "--target", "policy")
    assert code == 2
    assert "no controller of this run answers" in err


def test_chaos_lists_its_faults(call, here):
    code, out, _ = call("chaos", "--list")
    assert code == 0
    assert [row["fault"] for row in json.loads(call("chaos", "--list", "--json")[1])] == list(inject.FAULTS)
    for name in inject.FAULTS:
        assert name in out


def test_stop(call, sorted_run, monkeypatch):
    code, _, err = call("stop", sorted_run.name)
    assert code == 2
    assert "no controller of this run answers" in err
    asked = []
    server = serve_view(sorted_run, {"run": sorted_run.name}, asked)
    try:
        assert call("stop", sorted_run.name)[0] == 0
        assert asked == ["stop"]
        assert json.loads(call("stop", sorted_run.name, "--json")[1]) == {"run": sorted_run.name, "accepted": True}
        assert asked.pop() == "stop"
        monkeypatch.setenv("LINCKIA_TOKEN", "wrong")
        code, _, err = call("stop", sorted_run.name)
        assert (code, asked) == (2, ["stop"])
        assert "refuses the token" in err
        assert "wrong" not in err
    finally:
        server.close()


def test_a_port_taken_over_by_another_run_is_not_this_run(call, sorted_run):
    asked = []
    server = serve_view(sorted_run, {"run": "another"}, asked)
    try:
        assert "no controller of this run answers" in call("stop", sorted_run.name)[2]
        assert json.loads(call("status", sorted_run.name, "--json")[1])["live"] is None
    finally:
        server.close()
    assert asked == []


# ---- samples -----------------------------------------------------------------------------------------------------


def test_samples(call, sorted_run, monkeypatch):
    monkeypatch.setattr("linckia_trainer.checks.open_model", lambda path: (Tokenizer(), None))
    rows = json.loads(call("samples", sorted_run.name, "--step", 3, "--json")[1])
    assert rows[0] == {
        "position": 3, "sample": 0, "prompt": "ab=", "answer": "cd", "answer_tokens": 3, "finished": True, "reward": 1.0,
        "parts": {"exact": 1.0},
    }  # fmt: skip
    out = call("samples", sorted_run.name, "--step", 3)[1]
    for words in ("position 3, sample 0: reward 1, exact 1 (3 tokens)", "ab=\ncd\n", "[bold]b=", "cut off"):
        assert words in out
    assert "1 more" in call("samples", sorted_run.name, "--step", 3, "--limit", 1)[1]
    code, _, err = call("samples", sorted_run.name, "--step", 9)
    assert code == 2
    assert "holds steps 1 to 4" in err


# ---- checkpoints -------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed(call, sorted_run):
    rows = json.loads(call("checkpoints", sorted_run.name, "--json")[1])
    assert [(row["step"], row["group"], row["valid"], row["restores"]) for row in rows] == [
        (4, "policy", True, True),
        (4, "critic", True, True),
        (2, "policy", True, False),
        (2, "critic", True, False),
    ]
    assert rows[0]["tiers"] == ["run_directory"]
    assert rows[0]["bytes"] > 500
    code, out, _ = call("checkpoints", sorted_run.name)
    assert code == 0
    assert re.search(
        r"4\s+policy\s+run_directory\s+1\s+[\d.]+ kB\s+0 s\s+1\.1\s+valid, the next start restores it", out
    )
    assert call("checkpoints", "list", sorted_run.name, "--json")[0] == 0


def test_node_memory_is_listed_too(call, sorted_run, here):
    store = Store(str(sorted_run))
    memory = node_memory(RunConfig.model_validate(attempts.read(store, 1).config)).store
    assert Path(memory.uri).parent == here / "shm"
    save_state(memory, RunLog(store, None), "policy", 4, run=sorted_run.name)
    rows = json.loads(call("checkpoints", sorted_run.name, "--json")[1])
    assert rows[0]["tiers"] == ["node_memory", "run_directory"]


def test_verify_reads_every_byte(call, sorted_run):
    code, out, _ = call("checkpoints", "verify", sorted_run.name)
    assert code == 0
    assert "4 records in the log" in out
    assert "whole" in out
    store = Store(str(sorted_run))
    flip(store, "state/policy/00000004/1.1/0", -40)
    assert json.loads(call("checkpoints", sorted_run.name, "--json")[1])[0]["valid"]  # a header does not show it
    code, out, _ = call("checkpoints", "verify", sorted_run.name, "--json")
    found = json.loads(out)
    assert code == 1
    assert [row["valid"] for row in found["states"] if row["group"] == "policy"] == [False, True]
    assert [problem[:14] for problem in found["problems"]] == ["policy step 4:"]
    flip(store, record_key(4), -3)  # the policy would need it now
    assert "rewind" in call("checkpoints", "verify", sorted_run.name)[1]


def test_verify_warns_of_a_damaged_record_that_nobody_needs(call, sorted_run):
    flip(Store(str(sorted_run)), record_key(1), -3)
    code, out, _ = call("checkpoints", "verify", sorted_run.name)
    assert code == 0
    assert "warning: log/00000001" in out


def test_prune_keeps_what_the_config_keeps(call, sorted_run):
    store = Store(str(sorted_run))
    log = RunLog(store, None)
    for step in (1, 3):
        save_state(store, log, "policy", step, run=sorted_run.name)
    dry = json.loads(call("checkpoints", "prune", sorted_run.name, "--dry-run", "--json")[1])
    assert [state["key"] for state in dry["states"]] == ["state/policy/00000001/1.1/0"]
    assert store.exists("state/policy/00000001/1.1/0")
    out = call("checkpoints", "prune", sorted_run.name)[1]
    assert "1 state (" in out
    assert "0 records deleted" in out
    assert "deleted" in out
    assert not store.exists("state/policy/00000001/1.1/0")
    assert store.exists("state/policy/00000002/1.1/0")


def test_rewind_moves_aside(call, sorted_run):
    code, out, _ = call("checkpoints", "rewind", sorted_run.name, "--to", 2)
    assert code == 0
    assert "at step 2" in out
    assert RunLog(Store(str(sorted_run)), None).head() == 2
    assert [row["step"] for row in read_rows(sorted_run)] == [0, 1, 2]
    found = json.loads(call("checkpoints", "rewind", sorted_run.name, "--to", 2, "--json")[1])
    assert found == {"step": 2, "moved": []}
    code, _, err = call("checkpoints", "rewind", sorted_run.name, "--to", 3)
    assert code == 2
    assert "--to" in err


@pytest.mark.parametrize("command", [("prune",), ("rewind", "--to", "2")])
def test_a_live_run_is_left_alone(call, sorted_run, command):
    store = Store(str(sorted_run))
    server = serve_view(sorted_run, {"run": sorted_run.name})
    try:
        code, _, err = call("checkpoints", command[0], sorted_run.name, *command[1:])
    finally:
        server.close()
    assert code == 2
    assert "it is live" in err
    config = attempts.read(store, 1).config
    attempts.claim(store, {"host": this_host(), "pid": os.getpid(), "start_time": this_start_time(), "config": config})
    code, _, err = call("checkpoints", command[0], sorted_run.name, *command[1:])
    assert code == 2
    assert "attempt 2 is live" in err
    assert RunLog(store, None).head() == 4


def test_export_asks_the_data_plane(call, sorted_run, here, monkeypatch):
    asked = []
    module = types.ModuleType("linckia_trainer.state.export")
    module.export_checkpoint = lambda *arguments: asked.append(arguments) or 2
    monkeypatch.setitem(sys.modules, "linckia_trainer.state.export", module)
    assert call("checkpoints", "export", sorted_run.name, "--to", "model", "--step", 2)[0] == 0
    assert asked == [(str(sorted_run), {}, 2, Path("model"))]
    found = json.loads(call("checkpoints", "export", sorted_run.name, "--to", "model", "--json")[1])
    assert found == {"step": 2, "folder": str(here / "model")}
    asked.pop()
    code, _, err = call("checkpoints", "export", sorted_run.name, "--to", here)
    assert code == 2
    assert "not an empty folder" in err
    assert len(asked) == 1


def test_a_place_without_a_run(here):
    (here / "empty" / "attempts").mkdir(parents=True)
    with pytest.raises(UserError, match="no run has started there"):
        trainer.list_checkpoints(runs.find_run("empty"))
