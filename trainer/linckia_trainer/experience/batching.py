"""Batches: dicts of numpy arrays whose rows are sequences. Pure functions to build, split and rejoin them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia_trainer.experience.trajectory import Trajectory

Array = NDArray[Any]
Batch = dict[str, Array]
"""Column name -> array with one row per sequence, such as ``{"tokens": int32 [N, T], "lengths": int32 [N]}``."""

PADDING_ROW = -1
"""The row index of a row that was added to make counts equal; it is in no result."""

_PADDING_VALUES = {"lengths": 1, "prompt_lengths": 1, "positions": -1}


def assemble(trajectories: Sequence[Trajectory], pad_token: int) -> Batch:
    """The rollout's columns of one step's experience, rows ordered by (position, sample).

    Returns, for N trajectories and T = the longest prompt + answer: ``tokens`` int32 [N, T] right-padded with ``pad_token``;
    ``prompt_lengths``, ``lengths`` int32 [N]; ``loss_mask`` uint8 [N, T], 1 on answer tokens, the end token included;
    ``rollout_log_probs`` float32 [N, T], index t speaking of token t, 0 outside the mask; ``positions`` int64 [N]; ``samples``,
    ``weight_steps`` int32 [N]; ``finished`` uint8 [N], 1 where the answer ended by itself.

    The order of ``trajectories`` does not matter. Raises ValueError when there are none, two share a key, a
    prompt is empty or an answer and its log-probabilities differ in length.
    """
    rows = sorted(trajectories, key=lambda trajectory: trajectory.key)
    _check(rows)
    prompt_lengths = np.array([len(row.prompt_tokens) for row in rows], dtype=np.int32)
    lengths = prompt_lengths + np.array([len(row.answer_tokens) for row in rows], dtype=np.int32)
    shape = (len(rows), int(lengths.max()))
    tokens = np.full(shape, pad_token, dtype=np.int32)
    loss_mask = np.zeros(shape, dtype=np.uint8)
    log_probs = np.zeros(shape, dtype=np.float32)
    for i, row in enumerate(rows):
        prompt, end = prompt_lengths[i], lengths[i]
        tokens[i, :prompt] = row.prompt_tokens
        tokens[i, prompt:end] = row.answer_tokens
        loss_mask[i, prompt:end] = 1
        log_probs[i, prompt:end] = row.log_probs
    return {
        "tokens": tokens,
        "prompt_lengths": prompt_lengths,
        "lengths": lengths,
        "loss_mask": loss_mask,
        "rollout_log_probs": log_probs,
        "positions": np.array([row.position for row in rows], dtype=np.int64),
        "samples": np.array([row.sample for row in rows], dtype=np.int32),
        "weight_steps": np.array([row.weight_step for row in rows], dtype=np.int32),
        "finished": np.array([row.finish == "stop" for row in rows], dtype=np.uint8),
    }


def _check(rows: Sequence[Trajectory]) -> None:
    if not rows:
        raise ValueError("no trajectories to assemble")
    for previous, row in itertools.pairwise(rows):
        if previous.key == row.key:
            raise ValueError(f"two trajectories with the key (position, sample) = {row.key}")
    for row in rows:
        if len(row.prompt_tokens) == 0:
            raise ValueError(f"trajectory {row.key} has an empty prompt")
        if len(row.answer_tokens) != len(row.log_probs):
            raise ValueError(
                f"trajectory {row.key} has {len(row.answer_tokens)} answer tokens and {len(row.log_probs)} log-probabilities"
            )


def object_column(values: Sequence[Any]) -> Array:
    """A column of Python objects (texts, examples), so that they are split with the rows they belong to."""
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def shard(batch: Batch, num_shards: int, pad_rows: bool) -> tuple[list[Batch], list[NDArray[np.int64]]]:
    """Split a batch over data-parallel members, balanced by tokens; the same batch is always split the same way.

    With ``pad_rows`` there are ``num_shards`` shards of equal row counts, filled up with zero-weight rows: loss mask all 0, length 1,
    row index ``PADDING_ROW``. Without, counts differ by at most one and no row is added; a batch with fewer rows than
    ``num_shards`` makes fewer shards, so none is ever empty.

    Returns the shards and, for each, the batch's row index of its rows (int64, ascending, padding last). All shards keep the batch's
    width T, so that a row's numbers do not depend on its company. The shards' arrays are contiguous copies.
    """
    num_rows = _num_rows(batch)
    counts = min(num_shards, num_rows)
    groups = _balance(batch["lengths"], counts)
    if pad_rows:
        height = -(-num_rows // num_shards)
        groups = [_fill(group, height) for group in groups + [np.empty(0, dtype=np.int64)] * (num_shards - counts)]
    return [_take(batch, group) for group in groups], groups


def unshard(results: Sequence[Batch], indices: Sequence[NDArray[np.int64]]) -> Batch:
    """Per-row results of the shards, back in the batch's row order and without the padding rows.

    ``indices`` are those that ``shard`` returned. Raises ValueError when a result has another number of rows than its
    shard or when the shards' results have different columns.
    """
    order = np.concatenate(indices)
    columns = results[0].keys()
    joined: Batch = {}
    for name in columns:
        for result, rows in zip(results, indices, strict=True):
            if result.keys() != columns:
                raise ValueError(f"shards returned different columns: {sorted(columns)} and {sorted(result)}")
            if len(result[name]) != len(rows):
                raise ValueError(f"column {name!r} has {len(result[name])} rows for a shard of {len(rows)}")
        stacked = np.concatenate([result[name] for result in results])
        real = order != PADDING_ROW
        joined[name] = np.empty((int(real.sum()), *stacked.shape[1:]), dtype=stacked.dtype)
        joined[name][order[real]] = stacked[real]
    return joined


def _num_rows(batch: Batch) -> int:
    counts = {name: len(column) for name, column in batch.items()}
    if len(set(counts.values())) != 1 or not counts["lengths"]:
        raise ValueError(f"a batch needs the same number of rows, at least 1, in every column; it has {counts}")
    return counts["lengths"]


def _balance(lengths: NDArray[np.int32], num_groups: int) -> list[NDArray[np.int64]]:
    """Longest first to the group with the fewest tokens that still has room (Graham 1969, with equal counts)."""
    floor, num_larger = divmod(len(lengths), num_groups)
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for row in np.argsort(-lengths.astype(np.int64), kind="stable"):
        larger = sum(len(group) > floor for group in groups)
        room = floor + (1 if larger < num_larger else 0)
        target = min((i for i in range(num_groups) if len(groups[i]) < room), key=lambda i: (loads[i], i))
        groups[target].append(int(row))
        loads[target] += int(lengths[row])
    return [np.array(sorted(group), dtype=np.int64) for group in groups]


def _fill(group: NDArray[np.int64], height: int) -> NDArray[np.int64]:
    return np.concatenate([group, np.full(height - len(group), PADDING_ROW, dtype=np.int64)])


def _take(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    padding = rows == PADDING_ROW
    taken: Batch = {}
    for name, column in batch.items():
        values = np.ascontiguousarray(column[np.where(padding, 0, rows)])
        values[padding] = None if column.dtype == object else _PADDING_VALUES.get(name, 0)
        taken[name] = values
    return taken
