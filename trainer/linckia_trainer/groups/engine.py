"""DeepSpeed around a module: build it, step it, copy its checkpoint out, hash it.

DeepSpeed averages gradients over ranks; our losses are token sums over a denominator that already counts all ranks,
so ``backward`` multiplies by the world size.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from linckia.api.config import Optimizer, Trained
from linckia_trainer.groups.engine_errors import NonFiniteError

CHECKPOINT_TAG = "state"


def prepare_backend(device: str) -> None:
    """Tell DeepSpeed about the device before it is first imported. On CPU this also skips a 60 s kernel build."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo", verbose=False)


def build_trained_engine(module: nn.Module, group: Trained, device: str, dtype: torch.dtype, timeout: float) -> Any:
    """A DeepSpeed engine that trains ``module`` with AdamW at the group's ZeRO stage."""
    import deepspeed

    settings = group.optimizer
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    optimizer.register_step_pre_hook(_refuse_non_finite_gradients)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=deepspeed_config(group, device, dtype), dist_init_required=False
    )
    if group.zero_stage == 3:
        _clear_padding(module)
    bound_collectives(timeout)
    return engine


def _clear_padding(module: nn.Module) -> None:
    """ZeRO-3 leaves what fills up a parameter's last shard uninitialised; equal states have to be equal bits."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    parameter: Any
    for parameter in module.parameters():
        shard = parameter.ds_tensor
        first_padding = max(0, parameter.ds_numel - dist.get_rank() * shard.ds_numel)
        if first_padding < shard.ds_numel:
            shard.data.view(-1)[first_padding:] = 0
            master = safe_get_local_fp32_param(parameter).clone()
            master[first_padding:] = 0
            safe_set_local_fp32_param(parameter, master)


def build_inference_engine(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """A frozen module on its device; no engine is needed where nothing is trained."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module.to(device=device, dtype=dtype).eval()


def deepspeed_config(group: Trained, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's own configuration of a trained group."""
    zero: dict[str, Any] = {"stage": group.zero_stage}
    if group.offload and group.zero_stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
        if group.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": group.micro_batch_size,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: the last batch of an epoch is shorter
        "gradient_clipping": group.optimizer.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def bound_collectives(timeout: float) -> None:
    """Bound every process group's collectives; DeepSpeed clones groups with a limit of its own (30 minutes)."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=timeout), group)


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """The rate of PPO step ``step`` (1, 2, ...): linear warm-up, then constant, linear or cosine decay to 0.

    A pure function of the step, so that nothing about it has to be saved.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    end = settings.decay_steps or total_steps
    done = min(1.0, (step - 1 - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    return settings.lr * (1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def backward(engine: Any, loss: Tensor, last: bool) -> None:
    """One micro-batch of a mini-batch; gradients accumulate until ``last``."""
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss * dist.get_world_size())


def step(engine: Any) -> float:
    """The optimizer step that ends a mini-batch; returns the global gradient norm before clipping.

    Raises NonFiniteError on every rank if a gradient is not finite on any; nothing has been stepped on then, and no
    gradient is left.
    """
    norm = None
    if engine.zero_optimization_stage() == 0:  # the only stage that does not keep it
        norm = nn.utils.get_total_norm([one.grad for one in engine.module.parameters() if one.grad is not None])
    try:
        engine.step()
    except NonFiniteError:
        engine.zero_grad()
        raise
    if not engine.was_step_applied():  # ZeRO skips such a step by itself, with no more than a warning
        raise NonFiniteError("a gradient is not finite")
    return float(engine.get_global_grad_norm() if norm is None else norm)


def discard(engine: Any, loss: Tensor) -> None:
    """Drop the gradients of a mini-batch that cannot be finished, ``loss`` being its last. Collective.

    DeepSpeed accumulates them in places of its own, which it clears when it skips a step that is not finite.
    """
    backward(engine, loss * float("nan"), last=True)
    with contextlib.suppress(NonFiniteError):
        step(engine)


def all_finite(value: Tensor) -> bool:
    """Whether ``value`` is finite on every rank."""
    flag = torch.isfinite(value).all().to(torch.float32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def _refuse_non_finite_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    flag = torch.ones(())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                flag = flag.to(parameter.grad.device)
                flag = flag * torch.isfinite(parameter.grad).all()
    if not all_finite(torch.where(flag > 0, 0.0, float("nan"))):
        raise NonFiniteError("a gradient is not finite")


class CopyingCheckpointEngine:
    """DeepSpeed's checkpoint engine that keeps host copies of what it is given, to be written later.

    ``files`` maps each file name of DeepSpeed's checkpoint to its state; the copies are taken before ``save`` returns,
    so the next optimizer step may run while they are written. ``spare``: earlier such files, whose memory is used again.
    """

    def __init__(self, spare: dict[str, Any] | None = None) -> None:
        self.name = "copying"
        self.files: dict[str, Any] = {}
        self.spare = spare or {}

    def create(self, info: Any) -> None:
        self.files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: the files live in memory until they are written as one state."""

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).name
        self.files[name] = _copied(state_dict, self.spare.get(name))

    def load(self, path: str, map_location: Any = None) -> Any:
        # DeepSpeed's checkpoint holds argparse-like objects besides tensors; the content hash has been checked.
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: Any) -> None:
        pass

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        pass

    def preserves_storage_sharing(self) -> bool:
        return False


def copy_out(engine: Any, spare: dict[str, Any] | None = None) -> dict[str, Any]:
    """This rank's DeepSpeed checkpoint as {file name: state}, copied to host memory. Collective.

    ``spare``: what an earlier call gave and nobody needs any more; copying into memory that is there takes half the time.
    The file names are those DeepSpeed gives them, so ``load_checkpoint`` and DeepSpeed's own tools find them.
    """
    engine.checkpoint_engine = copier = CopyingCheckpointEngine(spare)
    engine.save_non_zero_checkpoint = True  # each rank's state stands alone: a rank restores from its own files
    with tempfile.TemporaryDirectory() as folder:  # DeepSpeed puts a helper script there, and nothing of ours
        engine.save_checkpoint(folder, tag=CHECKPOINT_TAG, save_latest=False)
    return copier.files


def load_checkpoint(engine: Any, folder: Path) -> None:
    """Load a DeepSpeed checkpoint whose files lie in ``folder/state``. Collective."""
    engine.checkpoint_engine = CopyingCheckpointEngine()
    path, _ = engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG, load_lr_scheduler_states=False)
    assert path is not None, f"DeepSpeed found no checkpoint in {folder}"


def state_tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that makes up this rank's state, by a stable name."""
    yield from named_tensors("", copy_out(engine))


def named_tensors(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key in value:
            yield from named_tensors(f"{prefix}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(f"{prefix}/{index}", item)


def _copied(value: Any, spare: Any = None) -> Any:
    """A copy in host memory, in that of ``spare`` where it has the same shape."""
    if isinstance(value, Tensor):
        if isinstance(spare, Tensor) and (spare.shape, spare.dtype) == (value.shape, value.dtype):
            return spare.copy_(value.detach())
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        named = spare if isinstance(spare, dict) else {}
        copied = {key: _copied(item, named.get(key)) for key, item in value.items()}
        return copied if type(value) is dict else type(value)(copied)
    if isinstance(value, list) or type(value) is tuple:
        placed = spare if isinstance(spare, list | tuple) and len(spare) == len(value) else [None] * len(value)
        items = [_copied(item, one) for item, one in zip(value, placed, strict=True)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
