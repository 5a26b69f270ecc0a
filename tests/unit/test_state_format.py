import io
import tarfile
from pathlib import Path

import pytest
from unit.log_builders import flip, local_store

from linckia.api.errors import DamagedError
from linckia_trainer.log import framing
from linckia_trainer.log.store import Store
from linckia_trainer.state.format import (
    StateHeader,
    extract,
    folder_files,
    parse_key,
    read_state,
    state_key,
    write_state,
)

HEADER = StateHeader(
    run="first", group="policy", step=12, rank=1, world=2, log_hash="ab" * 32, attempt=3, generation=4
)  # fmt: skip
FILES = [("zero/optim.pt", b"x" * 1000), ("model.pt", b"y" * 512), ("empty", b""), ("a/" + "long" * 40, b"z")]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path)


def test_a_state_comes_back_with_its_header_and_files(store: Store) -> None:
    key = write_state(store, HEADER, FILES)
    assert key == "state/policy/00000012/3.4/1" == HEADER.key
    header, files = read_state(store, key)
    assert header == HEADER
    assert [(name, bytes(content)) for name, content in files] == FILES


def test_keys_are_parsed_back() -> None:
    assert parse_key(state_key("rollout-1", 7, 1, 2, 0)) == ("rollout-1", 7, 1, 2, 0)
    for other in (
        "state/policy/7/1.1/0",
        "state/policy/00000007/1.1/0.tmp",
        "log/00000007",
        "state/a/b/00000007/1.1/0",
    ):
        assert parse_key(other) is None


def test_the_payload_is_a_tar_that_any_tool_reads(store: Store) -> None:
    data = store.get(write_state(store, HEADER, FILES))
    _, payload = framing.unpack(data)
    with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
        assert tar.getnames() == [name for name, _ in FILES]
        assert {member.mtime for member in tar} == {0}


def test_equal_states_are_equal_bytes_and_saving_again_is_no_harm(store: Store) -> None:
    first = store.get(write_state(store, HEADER, FILES))
    assert store.get(write_state(store, HEADER, iter(FILES))) == first


def test_contents_are_not_copied_on_the_way_in_or_out(store: Store) -> None:
    content = memoryview(bytearray(b"big" * 1000))
    seen = []

    class Watching(Store):
        def put(self, key: str, data: object) -> None:
            seen.extend(data)  # type: ignore[call-overload]
            super().put(key, data)  # type: ignore[arg-type]

    key = write_state(Watching(store.uri), HEADER, [("model.pt", content)])
    assert any(part is content for part in seen)
    _, files = read_state(store, key)
    assert isinstance(next(files)[1], memoryview)


def test_a_folder_goes_in_and_out(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "checkpoint", tmp_path / "restored"
    for name, content in FILES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    _, files = read_state(store, write_state(store, HEADER, folder_files(source)))
    extract(files, target)
    restored = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert restored == dict(FILES)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../outside", ""])
def test_a_file_name_that_leads_out_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no relative file name"):
        extract([(name, b"x")], tmp_path)
    with pytest.raises(ValueError, match="no relative file name"):
        write_state(store, HEADER, [(name, b"x")])


@pytest.mark.parametrize("byte", [0, 9, 20, 60, 1000, -1])
def test_changed_bytes_are_found(store: Store, byte: int) -> None:
    key = write_state(store, HEADER, FILES)
    flip(store, key, byte)
    with pytest.raises(DamagedError, match="state/policy/00000012"):
        read_state(store, key)


def test_a_state_under_anothers_key_is_found(store: Store) -> None:
    data = store.get(write_state(store, HEADER, FILES))
    store.put("state/policy/00000013/3.4/1", data)
    with pytest.raises(DamagedError, match=r"it is the state state/policy/00000012/3\.4/1"):
        read_state(store, "state/policy/00000013/3.4/1")


def test_an_object_that_is_no_state_is_found(store: Store) -> None:
    store.put(HEADER.key, framing.pack({"kind": "spool", "step": 12}, b""))
    with pytest.raises(DamagedError, match="it is no state"):
        read_state(store, HEADER.key)
