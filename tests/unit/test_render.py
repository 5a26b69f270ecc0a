"""Manifests from run configs: `linckia render`, and the builders behind it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from linckia.api.bundle import unpack
from linckia.api.errors import UserError
from linckia.api.kubernetes import RUN_LABEL
from linckia.api.names import BUNDLE_VARIABLE
from linckia.api.render import check_directory, check_name, entrypoint, kubernetes_name, on_kubernetes
from linckia.cli.main import app

ROOT = Path(__file__).parents[2]
RUN_DIR = "run.dir=s3://bucket/{name}"
CLUSTER = """\
apiVersion: v1
kind: Secret
---
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: any}
spec: {headGroupSpec: {rayStartParams: {}}}
"""


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rendered(*arguments: str, stdin: str | None = None) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["render", *arguments], input=stdin, catch_exceptions=False)
    assert done.exit_code == 0
    return list(yaml.safe_load_all(done.stdout))


def test_a_job_for_the_charts_cluster() -> None:
    shown, job = rendered("examples/first_run.yaml", RUN_DIR, "run.steps=9", "--cluster", "team", "-n", "ml")
    name = {"name": "first-run", "namespace": "ml", "labels": {RUN_LABEL: "first-run"}}
    assert shown["metadata"] == job["metadata"] == name
    spec = job["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": "team"}
    assert (spec["submissionMode"], spec["backoffLimit"]) == ("HTTPMode", 0)  # a retry would delete the shared cluster
    assert "jobId" not in spec  # a used id takes the old job's result
    assert shlex.split(spec["entrypoint"]) == [
        *("linckia", "train", "bundle:", RUN_DIR, "run.steps=9", "run.name=first-run"),
        *("control.host=0.0.0.0", "control.port=8470-8489", "recovery.watcher=operator"),
        *("--address", "auto", "--supervise", "--takeover"),
    ]


def test_the_job_carries_what_the_config_map_shows() -> None:
    shown, job = rendered("examples/first_run.yaml", RUN_DIR)
    bundle = unpack(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"][BUNDLE_VARIABLE])
    assert bundle.config == "examples/first_run.yaml"
    assert {"examples/sort_digits.py", "examples/data/sort_train.jsonl", "examples/data/sort_held_out.jsonl"} < set(
        bundle.files
    )
    assert shown["data"]["examples_first_run.yaml"] == bundle.files["examples/first_run.yaml"]
    assert shown["data"]["examples_sort_digits.py"] == (ROOT / "examples/sort_digits.py").read_text()
    assert not any(name.endswith(".jsonl") for name in shown["data"])


def test_a_job_with_a_cluster_of_its_own_watches_itself_and_is_retried(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    for source, stdin in ((str(tmp_path / "cluster.yaml"), None), ("-", CLUSTER)):
        job = rendered("examples/first_run.yaml", RUN_DIR, "--self-contained", source, stdin=stdin)[1]
        spec = job["spec"]
        assert spec["rayClusterSpec"] == {"headGroupSpec": {"rayStartParams": {}}}
        assert (spec["submissionMode"], spec["backoffLimit"]) == ("SidecarMode", 3)
        assert "clusterSelector" not in spec
        assert "recovery.watcher" not in spec["entrypoint"]


def test_what_the_config_says_itself_is_left_alone() -> None:
    written = {"control": {"port": 9000}, "recovery": None}
    assert on_kubernetes(written, own_cluster=False) == ["control.host=0.0.0.0", "recovery.watcher=operator"]
    spec = rendered("examples/first_run.yaml", RUN_DIR, "control.port=9000", "run.name=mine")[1]["spec"]
    assert spec["entrypoint"].count("control.port") == spec["entrypoint"].count("run.name") == 1


def test_the_command_survives_a_shell() -> None:
    given = ["run.dir=s3://b/{name}", 'rollout.stop=["\\n", "a b"]', "run.name=it's"]
    assert shlex.split(entrypoint(given))[3:6] == given


@pytest.mark.parametrize("name", ["first_run", "First", "-a", "a-", "a.b", "a" * 48])
def test_names_that_kubernetes_refuses(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_name(name)
    assert caught.value.field == "run.name"
    check_name(kubernetes_name(name))


def test_a_run_directory_has_to_outlive_a_pod() -> None:
    check_directory("s3://bucket/x")
    check_directory("/volume/runs")
    with pytest.raises(UserError) as caught:
        check_directory("runs/first")
    assert "bucket" in caught.value.next_step


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["examples/first_run.yaml"], "run.dir"),
        (["examples/first_run.yaml", RUN_DIR, "run.name=first_run"], "run.name"),
        (["examples/first_run.yaml", RUN_DIR, "--self-contained", "examples/first_run.yaml"], "--self-contained"),
        (["examples/first_run.yaml", RUN_DIR, "--self-contained", "missing.yaml"], "--self-contained"),
        (["missing.yaml", RUN_DIR], "CONFIG"),
    ],
)
def test_what_cannot_be_rendered_says_why(arguments: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["render", *arguments])
    assert isinstance(done.exception, UserError)
    assert done.exception.field == field
    assert done.stdout == ""


def test_train_enters_the_folder_of_the_bundle_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = rendered("examples/first_run.yaml", RUN_DIR)[1]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(BUNDLE_VARIABLE, yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"][BUNDLE_VARIABLE])
    # a contradiction that is found after the config was read, before anything starts
    done = CliRunner().invoke(app, ["train", "bundle:", "critic.micro_batch_size=3"])
    assert isinstance(done.exception, UserError)
    assert done.exception.field == "critic.micro_batch_size"
    assert Path.cwd().parent == tmp_path
    assert Path("examples/sort_digits.py").is_file()


def test_train_says_where_a_bundle_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUNDLE_VARIABLE, raising=False)
    done = CliRunner().invoke(app, ["train", "bundle:"])
    assert isinstance(done.exception, UserError)
    assert done.exception.field == BUNDLE_VARIABLE
