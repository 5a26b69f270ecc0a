"""Finished trajectories of the step that is being generated, so that a new attempt need not generate them again.

Objects: ``log/{step:08d}.partial/{attempt}-{n}``, each a batch of trajectories as packed arrays. They are
unhashed drafts: the record is the truth, and clears them.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from linckia.api.errors import DamagedError
from linckia_trainer.experience.trajectory import Trajectory
from linckia_trainer.log import framing
from linckia_trainer.log.framing import Buffer
from linckia_trainer.log.store import Store

_FINISHES = ("length", "stop")
_KEY = re.compile(r".*/(\d+)-(\d+)")


def folder(step: int) -> str:
    return f"log/{step:08d}.partial"


def write(store: Store, step: int, attempt: int, n: int, trajectories: Sequence[Trajectory]) -> bool:
    """Spool a batch as the attempt's ``n``-th of this step; False if that number was used already."""
    header = {"kind": "spool", "step": step, "attempt": attempt, "n": n}
    return store.put_if_absent(f"{folder(step)}/{attempt}-{n}", framing.frame(header, [encode(trajectories)]))


def read(store: Store, step: int) -> tuple[dict[tuple[int, int], Trajectory], list[str]]:
    """({(position, sample): trajectory}, warnings) of everything spooled for a step.

    Of two with one key the lower (attempt, n) wins, whoever reads. A damaged object is left out, with a warning: its
    trajectories are generated again.
    """
    batches = sorted(
        (int(match[1]), int(match[2]), key) for key in store.list(folder(step)) if (match := _KEY.match(key))
    )
    found: dict[tuple[int, int], Trajectory] = {}
    warnings = []
    for _, _, key in batches:
        try:
            _, payload = framing.unpack(store.get(key), key)
        except DamagedError as error:
            warnings.append(f"{key}: {error.reason}; its trajectories are generated again")
            continue
        for trajectory in decode(payload):
            found.setdefault(trajectory.key, trajectory)
    return found, warnings


def next_n(store: Store, step: int, attempt: int) -> int:
    """The first number an attempt has not used for this step."""
    used = [
        int(match[2]) for key in store.list(folder(step)) if (match := _KEY.match(key)) and int(match[1]) == attempt
    ]
    return max(used, default=-1) + 1


def clear(store: Store, step: int) -> None:
    """Remove what was spooled for a step that has its record."""
    store.delete(folder(step))


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """Token lists end to end, with their lengths; one row per trajectory in the other arrays."""

    def column(values: list[int], dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.array(values, dtype=dtype)

    data: bytes = save({
        "positions": column([one.position for one in trajectories], np.int64),
        "samples": column([one.sample for one in trajectories], np.int32),
        "prompt_lengths": column([len(one.prompt_tokens) for one in trajectories], np.int32),
        "answer_lengths": column([len(one.answer_tokens) for one in trajectories], np.int32),
        "prompt_tokens": _flat([one.prompt_tokens for one in trajectories], np.int32),
        "answer_tokens": _flat([one.answer_tokens for one in trajectories], np.int32),
        "log_probs": _flat([one.log_probs for one in trajectories], np.float32),
        "finished": column([_FINISHES.index(one.finish) for one in trajectories], np.uint8),
        "weight_steps": column([one.weight_step for one in trajectories], np.int32),
        "policy_generations": column([one.policy_generation for one in trajectories], np.int32),
    })  # fmt: skip
    return data


def decode(payload: Buffer) -> list[Trajectory]:
    arrays = load(bytes(payload))
    prompt_ends, answer_ends = np.cumsum(arrays["prompt_lengths"]), np.cumsum(arrays["answer_lengths"])
    prompts = np.split(arrays["prompt_tokens"], prompt_ends[:-1])
    answers = np.split(arrays["answer_tokens"], answer_ends[:-1])
    log_probs = np.split(arrays["log_probs"], answer_ends[:-1])
    return [
        Trajectory(
            position=int(arrays["positions"][row]),
            sample=int(arrays["samples"][row]),
            prompt_tokens=prompts[row],
            answer_tokens=answers[row],
            log_probs=log_probs[row],
            finish=_FINISHES[arrays["finished"][row]],
            weight_step=int(arrays["weight_steps"][row]),
            policy_generation=int(arrays["policy_generations"][row]),
        )
        for row in range(len(arrays["positions"]))
    ]


def _flat(pieces: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    joined: NDArray[np.generic] = np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype)
    return joined
