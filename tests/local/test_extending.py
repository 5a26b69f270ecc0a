"""The code of docs/extending.md, run as it stands."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from local import tiny
from unit.algorithms_batches import run_config

from linckia.api.algorithms import ALGORITHMS
from linckia.api.names import NAMESPACE
from linckia_trainer.algorithms import advantages_of
from linckia_trainer.roles import ROLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The document's files in a folder that this process and Ray's workers import from."""
    blocks = re.findall(r"```python\n# file: (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["length_role.py", "register.py", "use.py", "reinforce.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    ROLES.pop("length", None)
    ALGORITHMS.pop("reinforce", None)
    for name, _ in blocks:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_a_new_role_is_a_class_and_a_line(written: Path) -> None:
    ray.init(
        address="local", num_cpus=4, namespace=NAMESPACE, include_dashboard=False, logging_level="ERROR",
        log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )  # fmt: skip
    try:
        import use  # type: ignore[import-not-found]

        batch = {
            "lengths": np.array([7, 9, 12], np.int32),
            "prompt_lengths": np.array([4, 3, 9], np.int32),
            "loss_mask": np.ones((3, 12), np.uint8),
        }
        shares = use.length_shares(tiny.write_config(written / "run", "extended"), batch)
    finally:
        ray.shutdown()
    assert shares.tolist() == pytest.approx([3 / 6, 6 / 6, 3 / 6])


def test_a_new_algorithm_is_a_function_and_an_entry(written: Path) -> None:
    import reinforce  # type: ignore[import-not-found]

    assert advantages_of("reinforce") is reinforce.advantages
    assert not run_config({"name": "reinforce"}).has_critic
    batch = {"loss_mask": np.array([[0, 1, 1], [0, 1, 0]], np.uint8)}
    rewards = np.array([[0, 0, 3], [0, 1, 0]], np.float32)
    found = reinforce.advantages(batch, rewards, None)["advantages"]
    assert found.tolist() == [[0, 1, 1], [0, -1, 0]]
