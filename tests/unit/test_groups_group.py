import pytest

from linckia.api.plan import MemberPlan
from linckia_trainer.groups.group import environment


def member(**keys: object) -> MemberPlan:
    fields: dict[str, object] = {"rank": 0, "placement_group": "p", "bundle": 0, "cpus": 1, "gpus": 0.5}
    fields |= {"memory_bytes": 0, "custom": {}, "threads": 3} | keys
    return MemberPlan(**fields)  # type: ignore[arg-type]


def test_a_member_on_a_gpu_gets_its_threads_and_no_cpu_accelerator() -> None:
    variables = environment(member(), on_gpu=True)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "3"
    assert "DS_ACCELERATOR" not in variables
    assert not any(name.startswith("VLLM_RAY") for name in variables)
    assert environment(member(), on_gpu=False)["DS_ACCELERATOR"] == "cpu"


def test_the_workers_of_an_engine_are_told_their_bundles_and_shares() -> None:
    variables = environment(member(gpus=0.0, worker_bundles=(4, 5), worker_gpus=0.2), on_gpu=True)
    assert variables["VLLM_RAY_BUNDLE_INDICES"] == "4,5"
    assert variables["VLLM_RAY_PER_WORKER_GPUS"] == "0.2"


def test_offline_use_of_the_hub_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HOME", raising=False)
    variables = environment(member(), on_gpu=False)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "HF_HOME" not in variables
