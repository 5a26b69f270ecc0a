"""The curves of a run, drawn for real."""

from pathlib import Path
from typing import Any

import pytest

from linckia_trainer.metrics import names
from linckia_trainer.metrics.curves import draw_curves

ROWS = [{"step": step, names.REWARD: 0.1 * step, names.KL: 0.01 * step} for step in range(1, 4)]


@pytest.mark.parametrize("rows", [ROWS, []])
def test_curves_are_a_picture(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    draw_curves(rows, "sort", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
