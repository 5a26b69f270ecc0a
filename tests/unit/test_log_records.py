import dataclasses
import hashlib
import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from unit.log_builders import header, payload

from linckia_trainer.log.records import Carried, carried, decode, encode


def test_a_record_comes_back_with_types_and_values() -> None:
    arrays = {
        "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
        "loss_mask": np.array([[0, 1, 1]], np.uint8),
        "old_log_probs": np.array([-0.5, 0.0, -1e-30], np.float32),
        "positions": np.array([2**40], np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }
    got_header, got = decode(memoryview(encode(header(3), arrays)))
    assert got_header == header(3)
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        assert_array_equal(got[name], array)


def test_the_bytes_do_not_depend_on_order_memory_layout_or_numpy_numbers() -> None:
    first, second = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(4, np.float32)
    expected = encode(header(1), {"a": first, "b": second})
    assert encode(header(1), {"b": second, "a": first}) == expected
    assert encode(header(1), {"a": np.asfortranarray(first), "b": np.ones(8, np.float32)[::2]}) == expected
    numpy_header = dataclasses.replace(header(1), step=np.int64(1), kl_coefficient=np.float64(0.1))
    assert encode(numpy_header, {"a": first, "b": second}) == expected


def test_the_bytes_are_the_same_in_every_version() -> None:
    """The log's hash is over these bytes: a change here breaks every run there is."""
    expected = "a3d132e7d6c91b082bca6a2f63925322"
    assert hashlib.sha256(payload(1)).hexdigest()[:32] == expected


def test_the_payload_is_safetensors_with_a_canonical_json_header() -> None:
    data = payload(2)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    text = metadata["header"]
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert json.loads(text)["cursor_after"] == 8


def test_nan_in_the_header_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(dataclasses.replace(header(1), kl_coefficient=float("nan")), {"a": np.zeros(1)})


def test_a_skipped_record_moves_the_cursor_and_nothing_else() -> None:
    record = header(2)
    assert carried(record, skipped=False) == Carried(8, 2.1, {"count": 8, "mean": 0.5, "m2": 1.0})
    assert carried(record, skipped=True) == Carried(8, 0.1, {"count": 0, "mean": 0.0, "m2": 0.0})
