"""Every example loads, plans, and says the truth about its data."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from linckia.api.load import load_config
from linckia.api.plan import plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def sort_digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sort_digits", EXAMPLES / "sort_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / "data" / name).read_text().splitlines()]


def test_there_are_examples() -> None:
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_loads_and_plans(path: Path) -> None:
    config = load_config(path)
    gpus = config.placement.device == "gpu"
    planned = plan(config, gpus)
    assert {"policy", "reward", "rollout-0"} <= {group.name for group in planned.groups}
    assert (planned.totals.get("GPU", 0) > 0) == gpus


def test_gpu_examples_fill_their_machines() -> None:
    assert plan(load_config(EXAMPLES / "gpu_8x_colocated.yaml"), True).totals["GPU"] == pytest.approx(8)
    assert plan(load_config(EXAMPLES / "gpu_8x2_separate.yaml"), True).totals["GPU"] == 16


def test_grpo_differs_by_the_algorithm_and_has_no_critic() -> None:
    config = load_config(EXAMPLES / "grpo_sort.yaml")
    assert config.algorithm.name == "grpo"
    assert "critic" not in [group.name for group in plan(config, False).groups]


def test_data_is_what_the_example_writes(sort_digits: ModuleType, tmp_path: Path) -> None:
    sort_digits.write_data(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (EXAMPLES / "data" / file.name).read_bytes()


def test_held_out_prompts_are_not_trained_on() -> None:
    trained = {row["prompt"] for row in rows("sort_train.jsonl")}
    held_out = {row["prompt"] for row in rows("sort_held_out.jsonl")}
    assert len(held_out) == 200
    assert not trained & held_out


def test_a_policy_that_ignores_the_prompt_scores_below_0_3() -> None:
    answers = Counter(row["answer"] for row in rows("sort_held_out.jsonl"))
    assert answers.most_common(1)[0][1] / answers.total() < 0.3


def test_reward_gives_partial_credit(sort_digits: ModuleType) -> None:
    example = {"answer": "069"}
    found = sort_digits.reward(["sort 609="] * 4, ["069", "060", "0", "0699"], [example] * 4)
    assert [row["exact"] for row in found] == [1.0, 0.0, 0.0, 0.0]
    assert [row["digits"] for row in found] == pytest.approx([1, 2 / 3, 1 / 3, 3 / 4])
