"""Rewards for a batch: texts out of tokens, scored by the reward group's actors; a failure is tried twice."""

from typing import TYPE_CHECKING

from linckia.api.errors import UserError
from linckia_trainer.experience.batching import object_column, unshard
from linckia_trainer.experience.prompts import PromptSet
from linckia_trainer.experience.rewards import RewardError
from linckia_trainer.healing import Asked

if TYPE_CHECKING:
    from linckia_trainer.run import Batch, Run


def score_rewards(run: "Run", batch: "Batch", prompts: PromptSet) -> tuple["Batch", tuple[str, ...]]:
    """({"rewards" float32 [N], "reward_parts" float32 [N,P]}, part names).

    Raises RewardError when the reward fails twice with the same fingerprint: it would fail for ever.
    """
    examples = [prompts.examples[run.prompt_index(int(position), prompts)] for position in batch["positions"]]
    answers = [
        run.tokenizer.decode(row[start:end], skip_special_tokens=True)
        for row, start, end in zip(batch["tokens"], batch["prompt_lengths"], batch["lengths"], strict=True)
    ]
    columns = {
        "tokens": batch["tokens"],
        "lengths": batch["lengths"],
        "positions": batch["positions"],
        "samples": batch["samples"],
        "prompts": object_column([prompt.text for prompt in examples]),
        "answers": object_column(answers),
        "examples": object_column([prompt.example for prompt in examples]),
    }
    try:
        return _score(run, columns)
    except RewardError as error:
        cause = getattr(error, "cause", error)  # as the member raised it, without Ray's words around it
        run.warn(f"the reward failed and is tried once more: {cause}")
        return _score(run, columns)


def _score(run: "Run", columns: "Batch") -> tuple["Batch", tuple[str, ...]]:
    call = Asked(run, run.reward, "score", columns, pad_rows=False)
    timeout = run.config.reward.timeout
    try:
        results = call.results(timeout)
    except TimeoutError as error:
        raise UserError(
            "reward.timeout", timeout, f"the reward has not answered for {len(columns['prompts'])} samples in that time",
            "raise it, or make the reward faster",
        ) from error  # fmt: skip
    names = tuple(results[0].names)
    joined = unshard([{"rewards": one.rewards, "reward_parts": one.parts} for one in results], call.rows)
    return joined, names
