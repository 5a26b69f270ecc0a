"""A checkpoint as a Hugging Face folder that transformers and vLLM load. The one module of this package that needs torch."""

import tempfile
from pathlib import Path
from typing import Any

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.log import attempts
from linckia_trainer.log.chain import RunLog
from linckia_trainer.log.store import Store
from linckia_trainer.state.choose import Choice, newest_valid
from linckia_trainer.state.format import extract, read_state
from linckia_trainer.state.tiers import RUN_DIRECTORY, Tier, list_states

TAG = "state"
PREFIX = "lm."


def export_checkpoint(run_uri: str, options: dict[str, Any], step: int | None, to_folder: Path) -> int:
    """Write the policy of a durable checkpoint, the newest without ``step``, to ``to_folder``; returns its step.

    Raises UserError if there is no such checkpoint or the folder is not empty.
    """
    if to_folder.exists() and any(to_folder.iterdir()):
        raise UserError("--to", str(to_folder), "the folder is not empty", "name a new folder")
    store = Store(run_uri, options)
    newest = attempts.latest(store)
    if newest is None or not newest.config:
        raise UserError("RUN", run_uri, "no run has started there", "check the name, or train it first")
    config = RunConfig.model_validate(newest.config)
    choice = _find(store, config, step)
    with tempfile.TemporaryDirectory(prefix="linckia-export-") as folder:
        target = Path(folder, TAG)
        for ref in choice.refs:
            extract(read_state(store, ref.key)[1], target)
        _write_model(config, weights_of(Path(folder), config.policy.zero_stage), to_folder)
    return choice.step


def weights_of(folder: Path, zero_stage: int) -> dict[str, Any]:
    """Hugging Face name -> tensor, from a DeepSpeed checkpoint with the files of every rank in ``folder/state``."""
    import torch

    if zero_stage == 3:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
    else:
        path = folder / TAG / "mp_rank_00_model_states.pt"
        # DeepSpeed's files hold its own objects besides tensors; their content hash was checked when they were read.
        found = torch.load(path, map_location="cpu", weights_only=False)["module"]
    return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}


def _find(store: Store, config: RunConfig, step: int | None) -> Choice:
    log = RunLog(store, None)
    refs = list_states([Tier(RUN_DIRECTORY, store)], "policy", config.run.name)
    wanted = [ref for ref in refs if step is None or ref.step == step]
    choice = newest_valid(wanted, config.policy.world_size, log.head(), log.hash_at)
    if choice is None:
        there = ", ".join(str(one) for one in sorted({ref.step for ref in refs})) or "none"
        raise UserError("--step", step, f"no valid checkpoint of that step; there are: {there}", "choose one of these")
    return choice


def _write_model(config: RunConfig, weights: dict[str, Any], to_folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = config.model.path
    dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(model.state_dict()) - {name for name, _ in model.named_parameters()}
    strange = [*unexpected, *(set(missing) - tied)]
    assert not strange, f"the checkpoint is not of {source}: {strange}"
    model.save_pretrained(to_folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(to_folder)
