"""A run of a realistic size for the benchmarks: a random Llama made on the spot, GRPO or PPO, 32 sequences a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

LETTERS = "0123456789=sort "
SIZES = {"110M": (768, 12, 16384), "33M": (512, 8, 8192), "1M": (128, 4, 64)}  # hidden, layers, vocabulary
THREADS = 1  # of each member: the roles share the cores of the machine
PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 4, 9
MICRO_BATCH = 8


def make_model(folder: Path, size: str) -> int:
    """Write the model with a character tokenizer; returns its number of parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    hidden, layers, vocabulary = SIZES[size]
    letters = ["<pad>", "</s>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    heads = hidden // (64 if hidden >= 512 else 32)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


def write_config(folder: Path, algorithm: str, steps: int, new_tokens: int, node_memory: bool = True) -> Path:
    """A run on ``THREADS`` threads a member; every answer is ``new_tokens`` long but for the odd end token."""
    rows = [{"prompt": f"sort {number}="} for number in range(100, 164)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward(prompts, answers, examples):\n    return [float(len(a) % 7) for a in answers]\n"
    )
    resources = {"resources": {"threads": THREADS}}
    trained = {"micro_batch_size": MICRO_BATCH, "zero_stage": 2, "optimizer": {"lr": 1e-6}, **resources}
    loss_kl = {"where": "loss", "estimator": "k3"} if algorithm == "grpo" else {}
    config: dict[str, Any] = {
        "run": {"name": "bench", "steps": steps, "dir": str(folder / "runs" / "bench")},
        "model": {"path": str(folder / "model")},
        "data": {
            "train": {"file": str(folder / "train.jsonl")},
            "max_prompt_tokens": 16,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
        },
        "reward": {"function": f"{folder / 'reward.py'}:reward"},
        "algorithm": {"name": algorithm, "kl": {"coefficient": 0.01, **loss_kl}},
        "rollout": {"engines": 1, "max_new_tokens": new_tokens, **resources},
        "policy": trained,
        "reference": {"micro_batch_size": MICRO_BATCH, **resources},
        "storage": {
            "node_memory": {"every": 1, "keep": 2} if node_memory else None,
            "node_memory_dir": f"/dev/shm/linckia-bench-{os.getpid()}",
            "run_directory": {"every": 3, "keep": 2},
        },
    }
    if algorithm == "ppo":
        config["critic"] = trained
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(folder: Path, config: Path) -> list[dict[str, float]]:
    """Run it as a user would; returns the metric rows of its steps, without the first (warm-up)."""
    from linckia_trainer.metrics.sinks import read_rows

    command = [str(Path(sys.executable).with_name("linckia")), "train", str(config), "--quiet"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return [row for row in read_rows(folder / "runs" / "bench") if row["step"] > 1]


def seconds(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean seconds of each stage and of the step."""
    stages = ("generate", "score", "record", "update", "sync", "save", "step")
    return {stage: round(sum(row[f"seconds/{stage}"] for row in rows) / len(rows), 4) for stage in stages}


def machine() -> dict[str, float]:
    """What else a figure depends on: the cores, and how many threads wanted them in the last minute."""
    return {"cores": os.cpu_count() or 1, "load_average": round(os.getloadavg()[0], 1)}
