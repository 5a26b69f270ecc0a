"""Seeds. No generator state is ever saved: every random choice names what it is for."""

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for, such as ``derive_seed(run_seed, "sample", position, sample)``.

    The same parts give the same seed on every machine and Python; different parts give unrelated seeds.
    """
    digest = hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
