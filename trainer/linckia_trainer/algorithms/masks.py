"""What the numpy parts share about the loss mask: which tokens are trained on, and sums over exactly those.

Sums run over the trained tokens alone, in float64 and in row order, so that no result depends on the padding width T.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = Mapping[str, NDArray[Any]]  # the record's arrays by name


def trained_tokens(batch: Batch) -> NDArray[np.bool_]:
    """[N, T], true at tokens that are trained on."""
    return batch["loss_mask"].astype(np.bool_)


def last_trained(mask: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(rows, columns) of the last trained token of each row that has one."""
    rows = np.flatnonzero(mask.any(axis=1))
    columns = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1], axis=1)
    return rows, columns


def row_sums(values: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[N]: for each row the sum of ``values`` [N, T] over its trained tokens."""
    return group_sums(values[mask], np.nonzero(mask)[0], num_groups=mask.shape[0])


def group_sums(values: NDArray[Any], groups: NDArray[np.intp], num_groups: int) -> NDArray[np.float64]:
    """[num_groups]: the sums of ``values`` [n] over the entries whose number in ``groups`` [n] is 0, 1, ..."""
    return np.bincount(groups, weights=values.astype(np.float64), minlength=num_groups).astype(np.float64)
