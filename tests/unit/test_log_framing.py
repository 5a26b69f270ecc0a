import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linckia.api.errors import DamagedError
from linckia_trainer.log import framing
from linckia_trainer.log.framing import FIRST_READ_BYTES, PREFIX_BYTES, pack, read_header, read_header_with, unpack

OBJECT = pack({"kind": "record", "step": 7, "name": "a star"}, b"payload bytes")


def test_unpack_gives_back_what_was_packed_without_copying_the_payload() -> None:
    header, payload = unpack(OBJECT)
    assert header["step"] == 7
    assert header["name"] == "a star"
    assert header["payload_bytes"] == 13
    assert header["payload_sha256"] == hashlib.sha256(b"payload bytes").hexdigest()
    assert bytes(payload) == b"payload bytes"
    assert payload.obj is OBJECT


def test_the_layout_is_the_documented_one() -> None:
    length = int.from_bytes(OBJECT[8:12], "big")
    header = OBJECT[44 : 44 + length]
    assert OBJECT[:8] == b"LINCKIA1"
    assert OBJECT[12:44] == hashlib.sha256(header).digest()
    assert header.startswith(b'{"kind":"record","name":"a star","payload_bytes":13,"payload_sha256":"')
    assert OBJECT[44 + length :] == b"payload bytes"


def test_an_object_cut_off_anywhere_is_damaged() -> None:
    for end in range(len(OBJECT)):
        with pytest.raises(DamagedError, match=f"log/7: cut off after {end} "):
            unpack(OBJECT[:end], "log/7")


def test_an_object_with_any_bit_changed_is_damaged() -> None:
    for byte in range(len(OBJECT)):
        for bit in range(8):
            changed = bytearray(OBJECT)
            changed[byte] ^= 1 << bit
            with pytest.raises(DamagedError):
                unpack(changed)


def test_bytes_after_the_end_are_damage() -> None:
    with pytest.raises(DamagedError, match="1 bytes too long"):
        unpack(OBJECT + b"x")


def test_damage_names_the_object_the_place_and_the_next_step() -> None:
    changed = bytearray(OBJECT)
    changed[-1] ^= 1
    with pytest.raises(DamagedError) as caught:
        unpack(changed, "log/00000007")
    assert caught.value.field == "log/00000007"
    assert f"from byte {len(OBJECT) - 13}" in caught.value.reason
    assert "restore the object" in caught.value.next_step


def test_the_header_is_read_and_checked_without_the_payload() -> None:
    end = len(OBJECT) - 13
    assert read_header(OBJECT[:end])["step"] == 7
    with pytest.raises(DamagedError, match="cut off"):
        read_header(OBJECT[: end - 1])


def test_a_header_longer_than_the_first_read_is_read_with_a_second() -> None:
    data = pack({"long": "x" * (2 * FIRST_READ_BYTES)}, b"payload")
    asked = []

    def read(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return data[:num_bytes]

    header, payload_start = read_header_with(read, "object")
    assert len(header["long"]) == 2 * FIRST_READ_BYTES
    assert asked == [FIRST_READ_BYTES, payload_start]
    assert data[payload_start:] == b"payload"


def test_a_damaged_length_makes_nobody_read_gigabytes() -> None:
    with pytest.raises(DamagedError, match="which cannot be"):
        read_header_with(lambda _: framing.MAGIC + b"\xff" * (PREFIX_BYTES - 8), "object")


def test_nan_is_no_canonical_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack({"loss": float("nan")}, b"")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(header=st.dictionaries(st.text(), json_values, max_size=4), parts=st.lists(st.binary(), max_size=4))
def test_any_header_and_any_buffers_come_back(header: dict[str, object], parts: list[bytes]) -> None:
    framed = framing.frame(header, parts)
    data = b"".join(framed)
    got, payload = unpack(data)
    assert {key: got[key] for key in header.keys() - {"payload_bytes", "payload_sha256"}} == {
        key: value for key, value in header.items() if key not in ("payload_bytes", "payload_sha256")
    }
    assert bytes(payload) == b"".join(parts)
    assert data == pack(
        dict(reversed(header.items())), b"".join(parts)
    )  # the order of keys and buffers' cuts is nothing


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=64), place=st.integers(0, 10**6), cut=st.booleans())
def test_any_damage_is_found(data: bytes, place: int, cut: bool) -> None:
    framed = bytearray(pack({"step": 1}, data))
    place %= len(framed)
    if cut:
        del framed[place:]
    else:
        framed[place] ^= 0x10
    with pytest.raises(DamagedError):
        unpack(framed)
