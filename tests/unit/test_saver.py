"""One rank's saver without a model: what it says of a state that it, or another rank, cannot read."""

from pathlib import Path

import pytest
from unit.fakes import config_of

from linckia.api.errors import DamagedError
from linckia_trainer.groups import saver
from linckia_trainer.groups.engine import CHECKPOINT_TAG
from linckia_trainer.groups.member import Identity
from linckia_trainer.groups.saver import Saver
from linckia_trainer.log.local_files import TEMPORARY
from linckia_trainer.log.process import this_host
from linckia_trainer.state.format import StateHeader, write_state
from linckia_trainer.state.tiers import NODE_MEMORY, StateRef, node_memory_folder

HEADER = StateHeader("t", "policy", 3, 0, 2, "9f", 1, 1)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Saver, StateRef, list[bool]]:
    """A saver of rank 0 of 2 with one state in node memory, its ref, and what it told the other rank."""
    told: list[bool] = []

    def alone(flags: list[bool]) -> list[bool]:
        told.extend(flags)
        return flags

    monkeypatch.setattr(saver, "_true_anywhere", alone)
    made = Saver(Identity("t", "policy", 1, 0, 2, 1), config_of(tmp_path))
    write_state(made.tiers[NODE_MEMORY].store, HEADER, [("weights.pt", b"weights")])
    [ref] = made.node_states()
    return made, ref, told


def test_a_whole_state_is_given_to_load(made: tuple[Saver, StateRef, list[bool]]) -> None:
    one, ref, told = made
    with one.extracted(ref) as folder:
        assert folder is not None
        assert (folder / CHECKPOINT_TAG / "weights.pt").read_bytes() == b"weights"
    assert told == [False]
    assert not folder.exists()


def test_a_damaged_state_is_told_to_the_other_ranks_before_it_is_raised(
    made: tuple[Saver, StateRef, list[bool]], tmp_path: Path
) -> None:
    one, ref, told = made
    path = node_memory_folder(config_of(tmp_path)) / ref.key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=ref.key), one.extracted(ref):
        pass
    assert told == [True]


def test_nothing_is_loaded_when_another_rank_cannot_read(
    made: tuple[Saver, StateRef, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ref, _ = made
    monkeypatch.setattr(saver, "_true_anywhere", lambda flags: [True for _ in flags])
    with one.extracted(ref) as folder:
        assert folder is None


def test_half_a_state_of_a_killed_member_is_swept_out_of_node_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    left = node_memory_folder(config) / TEMPORARY / f"{this_host()}~999999999~1~x"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    Saver(Identity("t", "policy", 2, 0, 2, 1), config)
    assert not left.exists()
