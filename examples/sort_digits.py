"""Three digits to sort: ``sort 312=`` -> ``123``. A model made on the spot, data, and a reward with partial credit.

``make_model`` writes a one-million-parameter Llama after a short supervised warm-up (it knows the format, and little
more); PPO teaches it the rest.
"""

import json
import random
from pathlib import Path
from typing import Any

LETTERS = ["<pad>", "</s>", *"0123456789= sort"]
NUM_DIGITS = 3
NUM_HELD_OUT = 200
WARM_UP_STEPS = 30


def reward(prompts: list[str], answers: list[str], examples: list[dict[str, Any]]) -> list[dict[str, float]]:
    """``digits``: the share of characters in place, for credit on the way; ``exact``: whether the answer is right."""
    return [
        {
            "digits": sum(a == b for a, b in zip(answer, example["answer"], strict=False))
            / max(len(answer), NUM_DIGITS),
            "exact": float(answer == example["answer"]),
        }
        for answer, example in zip(answers, examples, strict=True)
    ]


def write_data(folder: Path) -> None:
    """All three-digit strings, in a fixed random order, split into prompts to train on and prompts held out."""
    strings = [f"{number:0{NUM_DIGITS}d}" for number in range(10**NUM_DIGITS)]
    random.Random(0).shuffle(strings)
    for name, part in (("train", strings[NUM_HELD_OUT:]), ("held_out", strings[:NUM_HELD_OUT])):
        lines = [json.dumps({"prompt": f"sort {one}=", "answer": "".join(sorted(one))}) for one in part]
        (folder / f"sort_{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_model(path: str, seed: int) -> None:
    """Write a Hugging Face folder: tokenizer, and a small Llama warmed up on right answers for ``WARM_UP_STEPS`` steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )
    warm_up(model, tokenizer, seed)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_tokenizer() -> Any:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = list(dict.fromkeys(LETTERS))
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def warm_up(model: Any, tokenizer: Any, seed: int) -> None:
    """Supervised steps on random strings: enough to know that digits and an end follow the ``=``."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WARM_UP_STEPS):
        strings = ["".join(rng.choices("0123456789", k=NUM_DIGITS)) for _ in range(64)]
        texts = [f"sort {one}={''.join(sorted(one))}</s>" for one in strings]
        tokens = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
        labels = tokens.clone()
        labels[:, : len(f"sort {strings[0]}=")] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    write_data(Path(__file__).parent / "data")
