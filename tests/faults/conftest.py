"""One golden run for every test of faults: whatever is struck, a run ends with its bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.live import Live, started


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def golden(work: Path) -> Iterator[Path]:
    """The folder of a run that nobody struck."""
    live: Live = started(work, "golden")
    try:
        assert live.finish() == 0, live.said()
        yield live.place
    finally:
        live.kill()
