"""A whole reconcile against a cluster written by hand: what it writes, and that it writes it once."""

import json

import httpx
import pytest
from unit.fake_kubernetes import CONTROL, HEAD, RUN, TOKEN, FakeCluster, pod, ray_job, view

from linckia.api.config import Recovery
from linckia.api.kubernetes import ATTEMPT_OF_LABEL, RUN_LABEL, STEP_ANNOTATION
from linckia.api.names import actor_name, beacon_name
from linckia.decide.limits import WatchPolicy, policy_to_json
from linckia.kube.client import ApiError


def running() -> FakeCluster:
    cluster = FakeCluster()
    cluster.reconcile(2)
    return cluster


def test_a_run_gets_its_record() -> None:
    cluster = running()
    assert cluster.api.writes == [f"create TrainingRun {RUN}", f"patch status {RUN}"]
    made = cluster.api.training_runs[RUN]
    assert made["metadata"]["ownerReferences"][0]["uid"] == f"uid-{RUN}"
    status = cluster.status
    assert (status["phase"], status["step"], status["progress"], status["groupsReady"]) == ("Running", 12, "11%", "2/2")
    assert status["groups"][0] | {"members": 2, "answering": 1} == status["groups"][0]
    assert status["groups"][1]["weightVersion"] == "11"
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Reachable")["reason"] == "Answers"


def test_a_second_look_at_the_same_run_writes_nothing() -> None:
    cluster = running()
    cluster.api.writes.clear()
    cluster.reconcile(5)
    assert cluster.api.writes == []


def test_an_operator_that_starts_anew_writes_nothing_of_what_stands() -> None:
    cluster = running()
    cluster.api.writes.clear()
    cluster.reconciler = cluster.operator(cluster.world)
    cluster.reconcile(3)
    assert cluster.api.writes == []


def test_a_record_that_is_deleted_or_edited_is_written_again() -> None:
    cluster = running()
    good = cluster.status
    for wrong in ({"phase": "Failed", "invented": 1}, {"phase": ["no", "phase"]}, {}):
        cluster.api.training_runs[RUN]["status"] = wrong
        cluster.see("trainingruns", cluster.api.training_runs[RUN])
        cluster.reconcile()
        assert cluster.status["phase"] == "Running"
        assert cluster.status.keys() == good.keys()
    cluster.see("trainingruns", cluster.api.training_runs.pop(RUN), deleted=True)
    cluster.reconcile(2)
    assert cluster.status["phase"] == "Running"


def test_nothing_is_made_for_a_rayjob_that_went_unseen() -> None:
    cluster = running()
    cluster.api.remove_job(RUN, told=False)
    cluster.api.training_runs.pop(RUN)  # garbage collected with it, unseen too
    cluster.ray.view = view(step=13)
    cluster.reconcile()
    cluster.api.writes.clear()
    cluster.reconcile()
    assert cluster.reconcile() is None
    assert cluster.api.writes == []


def test_the_record_of_a_rayjob_applied_again_waits_until_the_old_one_is_gone() -> None:
    cluster = running()
    cluster.api.remove_job(RUN)
    cluster.api.put_job(ray_job(metadata={"uid": "another"}))
    cluster.api.writes.clear()
    cluster.reconcile(2)
    assert cluster.api.writes == []
    cluster.see("trainingruns", cluster.api.training_runs.pop(RUN), deleted=True)
    cluster.reconcile(2)
    assert cluster.api.training_runs[RUN]["metadata"]["ownerReferences"][0]["uid"] == "another"
    assert cluster.status["phase"] == "Running"


def test_other_clusters_are_not_looked_after() -> None:
    cluster = FakeCluster(only_cluster="another")
    assert cluster.reconcile() is None
    assert cluster.api.writes == []


# ---- orders ----------------------------------------------------------------------------------------------------------


def dead_member(cluster: FakeCluster, generation: int = 2) -> None:
    assert cluster.ray.actors is not None
    cluster.ray.actors.append((actor_name(RUN, "policy", generation, 1), "DEAD"))


def orders(cluster: FakeCluster) -> list[httpx.Request]:
    return [one for one in cluster.ray.asked if one.url.path.startswith("/v1/groups/")]


def test_a_dead_member_is_ordered_once() -> None:
    cluster = running()
    dead_member(cluster)
    cluster.reconcile(3)
    (order,) = orders(cluster)
    assert order.url.path == "/v1/groups/policy/restart"
    assert json.loads(order.content)["generation"] == 2
    assert "GroupRestartOrdered" in cluster.api.reasons()


@pytest.mark.parametrize(("status", "times"), [(202, 1), (409, 1), (500, 3)])
def test_an_order_that_failed_is_given_again_and_an_outdated_one_is_not(status: int, times: int) -> None:
    cluster = running()
    cluster.ray.order = status
    dead_member(cluster)
    cluster.reconcile(3)
    assert len(orders(cluster)) == times
    assert ("GroupRestartOrdered" in cluster.api.reasons()) == (status == 202)


def test_a_new_attempt_is_told_again() -> None:
    cluster = running()
    dead_member(cluster)
    cluster.reconcile()
    assert cluster.ray.actors is not None
    cluster.ray.actors.append((beacon_name(RUN, 2, HEAD, 8470), "ALIVE"))
    cluster.ray.view = view(attempt=2)
    cluster.reconcile(2)
    assert len(orders(cluster)) == 2


@pytest.mark.parametrize("watcher", ["embedded", "off"])
def test_who_watches_itself_gets_no_orders(watcher: str) -> None:
    cluster = running()
    cluster.ray.view = view(watch=policy_to_json(WatchPolicy(Recovery.model_validate({"watcher": watcher}))))
    dead_member(cluster)
    cluster.reconcile(3)
    assert orders(cluster) == []


def test_a_view_of_another_version_gets_no_orders() -> None:
    cluster = running()
    cluster.ray.view = view(api_version=99)
    dead_member(cluster)
    cluster.reconcile(3)
    assert orders(cluster) == []
    assert cluster.condition("Misconfigured")["reason"] == "UnknownApiVersion"


def test_an_older_generation_is_nobody_s_loss() -> None:
    cluster = running()
    dead_member(cluster, generation=1)
    cluster.reconcile(3)
    assert orders(cluster) == []


# ---- children --------------------------------------------------------------------------------------------------------


def test_a_lost_head_with_redis_gets_a_child_once_the_old_job_is_over() -> None:
    cluster = running()
    cluster.lose_head()
    cluster.reconcile(5)
    assert cluster.ray.paths("POST") == [], "it may still be starting"
    assert cluster.status["phase"] == "Recovering"
    cluster.reconcile(5)
    assert cluster.ray.paths("POST") == [f"/api/jobs/{RUN}-id/stop"]
    assert list(cluster.api.jobs) == [RUN], "KubeRay has not seen the end yet"
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    cluster.reconcile()
    child = cluster.api.jobs[f"{RUN}-attempt-1"]
    assert child["metadata"]["labels"] == {RUN_LABEL: RUN, ATTEMPT_OF_LABEL: RUN}
    assert child["metadata"]["annotations"][STEP_ANNOTATION] == "12"
    assert child["metadata"]["ownerReferences"][0]["kind"] == "TrainingRun"
    assert child["spec"]["entrypoint"] == cluster.api.jobs[RUN]["spec"]["entrypoint"]
    assert "NewAttempt" in cluster.api.reasons()
    cluster.reconcile(10)
    assert len(cluster.api.jobs) == 2
    assert (cluster.status["rayJob"], cluster.status["attemptsMade"]) == (f"{RUN}-attempt-1", 1)


def test_the_child_s_controller_is_the_run_s() -> None:
    cluster = running()
    cluster.lose_head()
    cluster.reconcile(10)
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    cluster.reconcile()
    assert cluster.ray.actors is not None
    cluster.ray.actors.append((beacon_name(RUN, 2, HEAD, 8470), "ALIVE"))
    cluster.ray.view = view(attempt=2, step=14)
    cluster.reconcile()
    assert (cluster.status["phase"], cluster.status["attempt"]) == ("Running", 2)
    name = f"{RUN}-attempt-1"
    done = cluster.api.jobs[name] | {"status": {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}}
    cluster.api.put_job(done)
    cluster.ray.view = None
    cluster.reconcile(5)
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.status["progress"] == "100%"
    assert len(cluster.api.jobs) == 2


def test_a_failed_rayjob_whose_controller_lives_is_detached_and_gets_no_child() -> None:
    cluster = running()
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    cluster.reconcile(20)
    assert cluster.condition("Detached")["status"] == "True"
    assert cluster.status["phase"] == "Running"
    assert (list(cluster.api.jobs), cluster.ray.paths("POST")) == ([RUN], [])


def test_a_head_that_does_not_answer_freezes_all() -> None:
    cluster = running()
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    cluster.ray.actors, cluster.ray.view = None, None
    cluster.reconcile(50)
    assert cluster.status["phase"] == "Unknown"
    assert (list(cluster.api.jobs), cluster.ray.paths("POST")) == ([RUN], [])


def test_the_old_controller_is_asked_even_where_its_beacon_is_not_listed_any_more() -> None:
    cluster = running()
    cluster.ray.actors = []
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    cluster.reconcile(20)
    assert cluster.condition("Detached")["status"] == "True"
    assert list(cluster.api.jobs) == [RUN]


def test_three_children_that_move_nothing_are_the_end() -> None:
    cluster = running()
    cluster.lose_head()
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    for _ in range(200):
        cluster.reconcile(seconds=5)
        for name, job in list(cluster.api.jobs.items()):
            if name != RUN:
                cluster.api.put_job(
                    job | {"status": {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "rayClusterName": "gpu"}}
                )
    assert list(cluster.api.jobs) == [RUN, *(f"{RUN}-attempt-{number}" for number in (1, 2, 3))]
    assert cluster.status["phase"] == "Failed"
    assert cluster.condition("Failed")["reason"] == "TooManyAttempts"


def test_two_operators_change_nothing() -> None:
    cluster = running()
    second = cluster.second_operator()
    dead_member(cluster)
    cluster.lose_head()
    for _ in range(12):
        cluster.reconcile(seconds=1)
        second.reconcile(RUN)
        cluster.now += 1
    cluster.api.put_job(ray_job(jobStatus="FAILED", jobDeploymentStatus="Failed"))
    lagging = cluster.api.worlds.pop()  # the second has not seen yet what the first makes
    cluster.reconcile()
    assert second.reconcile(RUN) is not None
    cluster.api.worlds.append(lagging)
    assert cluster.api.writes.count(f"create RayJob {RUN}-attempt-1") == 2
    assert list(cluster.api.jobs) == [RUN, f"{RUN}-attempt-1"]
    for found in cluster.api.jobs.values():
        lagging.seen("rayjobs", found)
    for found in cluster.api.training_runs.values():
        lagging.seen("trainingruns", found)
    cluster.api.writes.clear()
    cluster.reconcile()
    second.reconcile(RUN)
    settled = len(cluster.api.writes)
    for _ in range(5):
        cluster.reconcile()
        second.reconcile(RUN)
    assert len(cluster.api.writes) == settled
    assert len(cluster.api.jobs) == 2


# ---- what is believed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["10.9.9.9:8470", "evil.example:80", f"{HEAD}:0", f"{HEAD}:x", "localhost:8470", ":1"]
)
def test_a_beacon_elsewhere_is_not_asked(address: str) -> None:
    cluster = FakeCluster()
    cluster.ray.actors = [(f"{RUN}/controller/7/{address}", "ALIVE")]
    cluster.reconcile(3)
    assert [one.url.path for one in cluster.ray.asked if one.url.port != 8265] == []
    assert cluster.condition("Reachable")["reason"] == "NotBelieved"
    assert cluster.status["phase"] == "Starting"


@pytest.mark.parametrize("wrong", [{"run": "another"}, {"attempt": 2}, {"attempt": None}, {"run": None}])
def test_another_run_or_attempt_is_not_believed(wrong: dict[str, object]) -> None:
    cluster = FakeCluster()
    cluster.ray.view = view(**wrong)
    cluster.reconcile(3)
    assert cluster.condition("Reachable")["reason"] == "NotBelieved"
    assert "step" not in cluster.status


def test_a_redirect_is_not_followed() -> None:
    cluster = FakeCluster()
    cluster.ray.view = httpx.Response(307, headers={"Location": "http://10.9.9.9/"})
    cluster.reconcile(3)
    assert cluster.condition("Reachable")["reason"] == "NoView"


@pytest.mark.parametrize("body", [b"x" * (5 * 2**20), b"not json", b"[1]", b'"run"', b"\xff\xfe"])
def test_what_is_no_view_is_not_read(body: bytes) -> None:
    cluster = FakeCluster()
    cluster.ray.view = httpx.Response(200, content=body)
    cluster.reconcile(3)
    assert cluster.condition("Reachable")["reason"] == "NoView"


def test_a_refused_token_is_said_and_shown_nowhere() -> None:
    cluster = FakeCluster()
    cluster.reconciler.looker.token = "the-wrong-secret"
    cluster.reconcile(3)
    assert cluster.condition("Misconfigured")["reason"] == "TokenRefused"
    assert "TokenRefused" in cluster.api.reasons()
    written = json.dumps([cluster.api.training_runs, cluster.api.events])
    assert "the-wrong-secret" not in written
    assert TOKEN not in written


def test_only_a_controller_s_own_pod_gets_the_token() -> None:
    cluster = running()
    given = {f"{one.url.host}:{one.url.port}" for one in cluster.ray.asked if "X-Linckia-Token" in one.headers}
    assert given == {CONTROL}


# ---- what a person is told -------------------------------------------------------------------------------------------


def test_an_event_is_made_when_its_reason_begins_and_not_again() -> None:
    cluster = running()
    short = {"metadata": {"name": "gpu"}, "status": {"readyWorkerReplicas": 7, "desiredWorkerReplicas": 8}}
    cluster.see("rayclusters", short)
    cluster.reconcile(4)
    assert cluster.api.reasons() == ["WaitingForWorkers"]
    assert next(iter(cluster.api.events.values()))["message"] == "waiting: 7/8 workers"
    assert cluster.api.writes.count(next(f"create Event {name}" for name in cluster.api.events)) == 1


def test_the_younger_of_two_rayjobs_with_one_run_is_told_and_left_alone() -> None:
    younger = ray_job("second", metadata={"creationTimestamp": "2026-02-01T00:00:00Z"})
    cluster = FakeCluster(ray_job(), younger)
    cluster.reconcile(3)
    (about, *_) = [one["involvedObject"] for one in cluster.api.events.values()]
    assert (about["kind"], about["name"]) == ("RayJob", "second")
    assert cluster.condition("Misconfigured")["reason"] == "RunTaken"
    assert cluster.status["rayJob"] == RUN


def test_a_run_name_that_is_none_gets_an_event_and_nothing_else() -> None:
    cluster = FakeCluster(ray_job(metadata={"labels": {RUN_LABEL: "My_Run"}}))
    assert cluster.reconciler.reconcile("My_Run") == 60.0
    cluster.reconciler.reconcile("My_Run")
    assert cluster.api.reasons() == ["InvalidRunName"]
    assert len(cluster.api.writes) == 1


def test_an_api_server_that_is_away_is_raised_and_nothing_is_lost() -> None:
    cluster = running()
    cluster.ray.view = view(step=13)
    cluster.api.away = True
    with pytest.raises(ApiError):
        cluster.reconcile()
    cluster.api.away = False
    cluster.reconcile()
    assert cluster.status["step"] == 13


def test_a_run_that_was_told_to_stop_has_stopped() -> None:
    cluster = running()
    cluster.ray.view = view(stopping=True)
    cluster.reconcile()
    cluster.api.put_job(ray_job(jobStatus="SUCCEEDED", jobDeploymentStatus="Complete"))
    cluster.reconcile(3)
    assert cluster.status["phase"] == "Stopped"


def test_a_cut_off_node_s_pod_is_named_with_the_command_that_frees_it() -> None:
    cluster = running()
    gone = pod("gpu-worker-b2", "10.1.0.3", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    cluster.see("pods", gone)
    cluster.reconcile()
    (event,) = cluster.api.events.values()
    assert "kubectl delete pod gpu-worker-b2 --grace-period=0 --force" in event["message"]
    assert "delete" not in " ".join(cluster.api.writes)
