"""A record for a reader: prompts, answers and rewards as text and numbers."""

from typing import Any

from linckia_trainer.log.chain import Record


def read_samples(record: Record, tokenizer: Any) -> list[dict[str, Any]]:
    """One entry per row of the record, in its order.

    Example: ``{"position": 17, "sample": 0, "prompt": "sort 312=", "answer": "123", "answer_tokens": 4, "finished": True,
    "reward": 1.0, "parts": {"exact": 1.0}}``. Special tokens stay in the prompt, where a template put them, and go from
    the answer.
    """
    arrays, names = record.arrays, record.header.reward_part_names
    rows = []
    for row, (start, end) in enumerate(zip(arrays["prompt_lengths"], arrays["lengths"], strict=True)):
        tokens = arrays["tokens"][row].tolist()
        parts = arrays["reward_parts"][row].tolist() if names else []
        rows.append(
            {
                "position": int(arrays["positions"][row]),
                "sample": int(arrays["samples"][row]),
                "prompt": tokenizer.decode(tokens[:start]),
                "answer": tokenizer.decode(tokens[start:end], skip_special_tokens=True),
                "answer_tokens": int(end - start),
                "finished": bool(arrays["finished"][row]),
                "reward": float(arrays["rewards"][row]),
                "parts": dict(zip(names, parts, strict=True)),
            }
        )
    return rows
