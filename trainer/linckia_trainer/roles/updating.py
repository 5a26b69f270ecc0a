"""What policy and critic updates share: mini-batches in a seeded order, device tensors, metric sums."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linckia.api.config import Trained
from linckia_trainer.experience.seeds import derive_seed
from linckia_trainer.groups import engine as ds
from linckia_trainer.groups.member import Member
from linckia_trainer.groups.model_member import Arrays


def to_device(arrays: Arrays, device: str) -> dict[str, Tensor]:
    """Arrays as tensors: tokens int64, loss_mask bool, the rest as they are."""
    kinds = {"tokens": torch.int64, "loss_mask": torch.bool}
    # torch.tensor copies: what Ray hands over is read-only shared memory.
    return {key: torch.tensor(value, dtype=kinds.get(key), device=device) for key, value in arrays.items()}


def mini_batches(
    arrays: Arrays, group: Trained, epochs: int, seed: int, step: int, member: Member
) -> Iterator[tuple[dict[str, NDArray[Any]], float]]:
    """(rows of one optimizer step on this rank, trained tokens of it over all ranks), epoch after epoch.

    Each epoch's order comes from (run seed, step, epoch, rank). Collective: every rank yields equally often, since
    every rank holds equally many rows.
    """
    rows = len(arrays["lengths"])
    whole = group.mini_batch_size is None
    size = rows if whole else max(1, (group.mini_batch_size or 0) // group.world_size)
    for epoch in range(epochs):
        generator = np.random.default_rng(derive_seed(seed, step, member.identity.group, epoch, member.identity.rank))
        order = np.arange(rows) if whole else generator.permutation(rows)
        for start in range(0, rows, size):
            chosen = order[start : start + size]
            mini = {key: value[chosen] for key, value in arrays.items()}
            tokens = torch.tensor(float(mini["loss_mask"].sum()), device=member.device)
            yield mini, max(1.0, float(ds.sum_over_ranks(tokens)))


class Sums:
    """Metric sums over tokens, turned into means over all ranks at the end."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.tokens = torch.zeros(())

    def add(self, mask: Tensor | None, **metrics: Tensor) -> None:
        if mask is not None:
            self.tokens = self.tokens.to(mask.device) + mask.sum()
        for name, value in metrics.items():
            self.values[name] = self.values.get(name, 0) + value.detach().float()

    def means(self, prefix: str) -> dict[str, float]:
        names = sorted(self.values)
        packed = torch.stack([self.tokens.float(), *(self.values[name].reshape(()) for name in names)])
        tokens, *sums = ds.sum_over_ranks(packed).tolist()
        return {f"{prefix}/{name}": value / max(1.0, tokens) for name, value in zip(names, sums, strict=True)}
