"""A run small enough to start many times: a two-layer model that sorts digits, its data, its reward, its config."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

REWARD = '''
import time
from pathlib import Path

PACE = Path(__file__).with_name("pace")
HUNGRY = Path(__file__).with_name("hungry")


def reward(prompts, answers, examples):
    """The share of characters in place; a pure function of the answer. Takes as many seconds longer as the file ``pace``
    beside it says.

    For the file ``hungry`` it once asks for 2 GB, untouched, and gives them back if it gets them.
    """
    if PACE.exists():
        time.sleep(float(PACE.read_text()))
    if HUNGRY.exists():
        HUNGRY.unlink()
        [bytearray(1 << 24) for _ in range(128)]
    wanted = ["".join(sorted(prompt[5:8])) for prompt in prompts]
    return [
        {"digits": sum(a == b for a, b in zip(answer, want)) / 3, "exact": float(answer == want)}
        for answer, want in zip(answers, wanted)
    ]
'''


def make_model(folder: Path, hidden: int = 128, layers: int = 2, tied: bool = True) -> Path:
    """A random Llama with a character tokenizer; head_dim 32, as vLLM's CPU attention wants it."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<pad>", "</s>", *"0123456789=sort "]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_data(path: Path, num_prompts: int, first: int = 100) -> Path:
    rows = [{"prompt": f"sort {number}="} for number in range(first, first + num_prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    """A config file in ``folder`` for the run ``name``; ``sections`` win over these defaults, key by key."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not model.exists():
        make_model(model)
    write_data(folder / "train.jsonl", 10)
    write_data(folder / "held_out.jsonl", 8, first=500)
    (folder / "reward.py").write_text(REWARD)
    config: dict[str, dict[str, Any]] = {
        "run": {"name": name, "steps": 14, "seed": 7, "dir": str(folder / "runs" / name)},
        "model": {"path": str(model)},
        "data": {
            "train": {"file": str(folder / "train.jsonl")},
            "held_out": {"file": str(folder / "held_out.jsonl")},
            "max_prompt_tokens": 16,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        "reward": {"function": f"{folder / 'reward.py'}:reward", "weights": {"exact": 0.0}, "normalize": True},
        "algorithm": {"kl": {"coefficient": 0.02, "target": 0.05}, "epochs": 2},
        "rollout": {"engines": 2, "max_new_tokens": 6},
        "policy": {"num_gpus_per_node": 2, "mini_batch_size": 8, "micro_batch_size": 2, "optimizer": {"lr": 1e-3}},
        "critic": {"micro_batch_size": 4, "optimizer": {"lr": 1e-3}},
        "evaluation": {"every": 7, "score": "exact"},
        "storage": {
            "run_directory": {"every": 3, "keep": 2},
            "spool_seconds": 0,
            "node_memory_dir": str(folder / "node_memory"),
        },
    }
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(config: Path, *arguments: str) -> list[str]:
    """The ``linckia train`` of this environment."""
    return [str(Path(sys.executable).with_name("linckia")), "train", str(config), "--quiet", *arguments]


def start(place: Path, config: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """``linckia train`` in ``place``, which its environment names, in a session of its own; it says what it says to output.txt."""
    with (place / "output.txt").open("ab") as log:
        return subprocess.Popen(
            command(config, *arguments),
            cwd=place,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PWD": str(place)},
        )


def kill_tree(process: "subprocess.Popen[Any]") -> int:
    """SIGKILL a controller, its Ray and every member at once; returns how many processes that were. Nothing of it is left."""
    if process.poll() is not None:
        return 0
    family = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *family]:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
    psutil.wait_procs(family, timeout=30)
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    return len(family) + 1
