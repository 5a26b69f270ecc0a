import ipaddress
import json
import socket
import stat
from dataclasses import asdict
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from unit.fakes import Healer, config_of

from linckia.api.access import RunFile, find_token, read_run_file
from linckia.api.errors import UserError
from linckia_trainer.attempt import AttemptView
from linckia_trainer.control.server import make_app, prometheus_text, reachable, serve
from linckia_trainer.control.token import run_token

VIEW = {
    "run": "sort-seed1",
    "attempt": 2,
    "step": 7,
    "metrics": {"reward/mean": 0.25, "reward/part/exact": 1.0, "kl/reference": None, "not/ours": 3.0},
}
TOKEN = {"X-Linckia-Token": "secret"}


@pytest.fixture
def asked():
    return []


@pytest.fixture
def client(asked):

    def checkpoint():
        asked.append("checkpoint")
        return {"accepted": False}

    actions = {"checkpoint": checkpoint, "stop": lambda: asked.append("stop")}
    return TestClient(make_app(lambda: dict(VIEW), actions, "secret"))


def test_the_run(client):
    answer = client.get("/v1/run", headers=TOKEN)
    assert answer.status_code == 200
    assert answer.json() == {"api_version": 1, **VIEW}


@pytest.mark.parametrize(("action", "accepted"), [("checkpoint", False), ("stop", True)])
def test_actions_are_asked_for(client, asked, action, accepted):
    answer = client.post(f"/v1/{action}", headers=TOKEN)
    assert (answer.status_code, answer.json(), asked) == (202, {"accepted": accepted}, [action])
    assert client.get(f"/v1/{action}", headers=TOKEN).status_code == 405


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/run"),
        ("GET", "/metrics"),
        ("POST", "/v1/checkpoint"),
        ("POST", "/v1/stop"),
        ("POST", "/v1/groups/policy/restart"),
        ("POST", "/v1/roles/rollout/scale"),
    ],
)
def test_without_the_token_nothing_is_told_or_done(client, asked, method, path):
    missing = client.request(method, path)
    wrong = client.request(method, path, headers={"X-Linckia-Token": "secreT"})
    assert (missing.status_code, wrong.status_code) == (401, 403)
    assert "sort" not in missing.text + wrong.text
    assert "secret" not in missing.text + wrong.text
    assert asked == []


def test_the_page_holds_nothing_of_the_run(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "v1/run" in answer.text
    assert "X-Linckia-Token" in answer.text
    assert "sort-seed1" not in answer.text
    assert "http" not in answer.text.replace("http-equiv", "")  # self-contained: nothing comes from elsewhere
    assert client.get("/docs").status_code == 404


def test_prometheus_reads_the_metrics(client):
    answer = client.get("/metrics", headers=TOKEN)
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    label = {"run": "sort-seed1"}
    assert samples == {
        "linckia_step": (label, 7.0),
        "linckia_attempt": (label, 2.0),
        "linckia_reward_mean": (label, 0.25),
        "linckia_reward_part_exact": (label, 1.0),
    }
    assert "mean reward" in prometheus_text(VIEW)


def test_a_real_port_is_bound_served_and_given_back():
    server = serve(lambda: dict(VIEW), {}, "127.0.0.1", 0, "secret")
    port = int(server.address.rpartition(":")[2])
    try:
        assert server.address == f"127.0.0.1:{port}"
        assert httpx.get(f"http://{server.address}/v1/run", headers=TOKEN, timeout=10).json()["step"] == 7
        with pytest.raises(UserError) as caught:
            serve(lambda: dict(VIEW), {}, "127.0.0.1", port, "secret")
        assert (caught.value.field, caught.value.value) == ("control.port", port)
    finally:
        server.close()
    serve(lambda: dict(VIEW), {}, "127.0.0.1", port, "secret").close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_told_as_one_that_is_reached(host):
    server = serve(lambda: dict(VIEW), {}, host, 0, "secret")
    try:
        told = ipaddress.ip_address(server.address.rpartition(":")[0].strip("[]"))
        assert not told.is_unspecified
        assert httpx.get(f"http://{server.address}/v1/run", headers=TOKEN, timeout=10).json()["step"] == 7
    finally:
        server.close()


def test_a_host_without_a_way_out_tells_its_own_loopback(monkeypatch):
    class Unreachable(socket.socket):
        def connect(self, address):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unreachable)
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.7", "fe80::1%eth0")] == [
        "127.0.0.1", "::1", "10.0.0.7", "fe80::1%eth0",
    ]  # fmt: skip


def test_an_address_that_is_not_ours():
    with pytest.raises(UserError, match="control"):
        serve(dict, {}, "192.0.2.1", 0, "secret")  # TEST-NET: on no machine
    with pytest.raises(UserError, match=r"control\.host"):
        serve(dict, {}, "not an address", 0, "secret")


# ---- token and run.json ------------------------------------------------------------------------------------------


def test_the_token_is_made_once_and_private(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LINCKIA_TOKEN", raising=False)
    assert find_token("sort") is None
    token = run_token("sort")
    assert len(token) >= 32
    assert run_token("sort") == find_token("sort") == token
    path = tmp_path / ".config" / "linckia" / "sort.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("LINCKIA_TOKEN", "mine")
    assert run_token("sort") == find_token("sort") == "mine"


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / ".config").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LINCKIA_TOKEN", raising=False)
    with pytest.raises(UserError, match="LINCKIA_TOKEN"):
        run_token("sort")


def test_run_file(tmp_path):
    assert read_run_file(tmp_path) is None
    run = RunFile("sort", "s3://b/sort", {"key": "x"}, 2, "127.0.0.1:1", "node-0", 1, "/c.yaml", 3.0)
    (tmp_path / "run.json").write_text(json.dumps({**asdict(run), "later": True}))
    assert read_run_file(tmp_path) == run
    for text in ("{}", "[]", "{", '"a"'):
        (tmp_path / "run.json").write_text(text)
        assert read_run_file(tmp_path) is None
    assert read_run_file(tmp_path / "run.json") is None


# ---- orders to an attempt ----------------------------------------------------------------------------------------


@pytest.fixture
def attempt(tmp_path):
    """The control API of an attempt whose groups stand: a policy of generation 3 and two engines."""
    config = config_of(tmp_path)
    control = AttemptView(config)
    groups = [SimpleNamespace(name=name, generation=3) for name in ("policy", "rollout-0", "rollout-1")]
    control.run = SimpleNamespace(config=config, groups=groups, healer=Healer(), wanted_engines=None)
    return control, TestClient(make_app(dict, control.actions(), "secret"))


def test_a_group_is_restarted_by_the_generation_that_was_seen(attempt):
    control, client = attempt
    answer = client.post("/v1/groups/policy/restart", headers=TOKEN, json={"generation": 3, "reason": "it hangs"})
    assert (answer.status_code, answer.json()["generation"]) == (202, 3)
    [loss] = control.run.healer.losses
    assert (loss.group, loss.generation, loss.cause) == ("policy", 3, "it hangs")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/groups/policy/restart", {"generation": 2, "reason": "late"}, 409, "stands as generation 3, not 2"),
        ("/v1/groups/critic/restart", {"generation": 1, "reason": "x"}, 404, "it has policy, rollout-0, rollout-1"),
        ("/v1/groups/policy/restart", {"generation": 3}, 422, "reason"),
        ("/v1/roles/rollout/scale", {"engines": 0}, 422, "at least one engine"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(attempt, path, body, status, words):
    control, client = attempt
    answer = client.post(path, headers=TOKEN, json=body)
    assert answer.status_code == status
    assert words in answer.text
    assert control.run.healer.losses == []
    assert control.run.wanted_engines is None


def test_the_number_of_engines_is_asked_for(attempt):
    control, client = attempt
    assert client.post("/v1/roles/rollout/scale", headers=TOKEN, json={"engines": 3}).status_code == 202
    assert control.run.wanted_engines == 3


def test_orders_before_the_groups_stand_are_refused(attempt):
    control, client = attempt
    control.run = None
    answer = client.post("/v1/groups/policy/restart", headers=TOKEN, json={"generation": 1, "reason": "x"})
    assert (answer.status_code, "is starting" in answer.text) == (409, True)


def test_of_a_range_of_ports_the_first_free_one_is_taken() -> None:
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        server = serve(dict, {}, "127.0.0.1", f"{first}-{first + 20}", "secret")
        try:
            assert first < int(server.address.rpartition(":")[2]) <= first + 20
        finally:
            server.close()
        other.bind(("127.0.0.1", 0))
        other.listen()
        alone = other.getsockname()[1]
        with pytest.raises(UserError) as caught:
            serve(dict, {}, "127.0.0.1", f"{alone}-{alone}", "secret")
    assert (caught.value.field, caught.value.value) == ("control.port", f"{alone}-{alone}")
