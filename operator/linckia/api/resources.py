"""Ray resources: sums of them, and in words."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Bundle = Mapping[str, float]
_SCALE = {"memory": (1e9, " GB")}


def add_resources(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of resource mappings, to Ray's precision."""
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = round(total.get(name, 0.0) + amount, 4)
    return total


def in_units(name: str, amount: float) -> str:
    """An amount of one resource, memory in GB."""
    scale, unit = _SCALE.get(name, (1.0, ""))
    return f"{amount / scale:.4g}{unit}"


def words(bundle: Bundle) -> str:
    """A bundle in words, such as ``1 GPU, 4 CPU, 16 GB memory``."""
    names = sorted(bundle, key=lambda name: (name not in ("GPU", "CPU"), name != "GPU", name))
    return ", ".join(f"{in_units(name, bundle[name])} {name}" for name in names) or "nothing"


def describe(nodes: Sequence[Bundle]) -> str:
    """The cluster in words: like nodes counted, Ray's own bookkeeping resources left out."""
    if not nodes:
        return "the cluster has no node"
    kinds = Counter(
        words({k: v for k, v in node.items() if ":" not in k and k != "object_store_memory" and v}) for node in nodes
    )
    return "the cluster has " + "; ".join(f"{count} node{'s' * (count > 1)} of {kind}" for kind, count in kinds.items())
