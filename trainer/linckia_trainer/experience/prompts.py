"""Where prompts come from (JSONL or a reasoning_gym task) and in which order a run takes them."""

import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import Data, Prompts, ReasoningGym
from linckia.api.errors import UserError
from linckia_trainer.experience.seeds import derive_seed


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for an engine. Immutable.

    ``text`` is what the model reads, as text (a chat already rendered by the template); ``tokens`` is the same as token ids;
    ``example`` is the line of the file or the entry of the task, for reward functions and verifiers.

    Example: ``Prompt(text="sort 312=", tokens=[20, 16, ...], example={"prompt": "sort 312=", "answer": "123"})``
    """

    text: str
    tokens: list[int]
    example: dict[str, Any]


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one source in its own order. ``content_hash`` (hex) changes with any prompt, example or token."""

    examples: list[Prompt]
    content_hash: str


@dataclass(frozen=True)
class _Source:
    """One example before it is tokenised, and how to name it in an error: ``data.jsonl:17``."""

    name: str
    prompt: Any
    example: dict[str, Any]
    identity: Any


def load_prompts(
    prompts: Prompts, data: Data, tokenizer: Any, context_limit: int, where: str = "data.train"
) -> PromptSet:
    """Read, render and tokenise every prompt of a source; whatever is wrong with one is found here, before anything starts.

    A prompt is a text, or a list of chat messages ``{"role": ..., "content": ...}`` that the tokenizer's chat template renders, with
    the start of the assistant's turn added. ``data.chat_template`` makes a text one user message. A text that is
    not wrapped is tokenised as it stands; a beginning-of-sequence token is put before it if the tokenizer puts one
    before every text, an end token never follows it.

    Args:
        context_limit: tokens a prompt may have: the model's context less ``rollout.max_new_tokens``.
        where: the config section that names the source, for errors.

    Raises UserError for a missing, empty or malformed file (with file and line), a prompt that is missing, empty or too
    long, chat prompts without a chat template, an unknown task or one that refuses its options.
    """
    if prompts.file is not None:
        sources = list(_read_jsonl(Path(prompts.file), data.prompt_key, where))
    else:
        assert prompts.reasoning_gym is not None  # the config has exactly one source
        sources = list(_read_task(prompts.reasoning_gym, where))
    limit = min(data.max_prompt_tokens, context_limit)
    examples = []
    digest = hashlib.sha256()
    for source in sources:
        text, tokens = _render(source, data, tokenizer, where)
        if len(tokens) > limit:
            raise _too_long(source, len(tokens), data.max_prompt_tokens, context_limit, where)
        examples.append(Prompt(text, tokens, source.example))
        digest.update(json.dumps([text, tokens, source.identity], sort_keys=True).encode() + b"\n")
    return PromptSet(examples, digest.hexdigest())


def prompt_at(position: int, num_prompts: int, seed: int, shuffle: bool) -> int:
    """The index of the prompt at a position, counted through all epochs; each epoch has an order of its own."""
    epoch, place = divmod(position, num_prompts)
    return int(_epoch_order(epoch, num_prompts, seed)[place]) if shuffle else place


def step_positions(cursor: int, num_prompts: int, prompts_per_step: int) -> tuple[list[int], int, int]:
    """The positions of the step that starts at ``cursor``, the next cursor, and the epoch (from 0).

    A step never crosses an epoch: the last one of an epoch is short, so each prompt is used exactly once in it.
    """
    epoch = cursor // num_prompts
    end = min(cursor + prompts_per_step, (epoch + 1) * num_prompts)
    return list(range(cursor, end)), end, epoch


@functools.lru_cache(maxsize=4)
def _epoch_order(epoch: int, num_prompts: int, seed: int) -> NDArray[np.int64]:
    # Sorting raw draws, since numpy keeps bit generators' raw streams stable over versions and Generator.permutation not (NEP 19).
    draws = np.random.PCG64(derive_seed(seed, "order", epoch)).random_raw(num_prompts)
    return np.argsort(draws, kind="stable").astype(np.int64)


def _read_jsonl(path: Path, prompt_key: str, where: str) -> Iterator[_Source]:
    field = f"{where}.file"
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise UserError(
            field, str(path), reason, "give the path of a JSONL file, from where you start the run"
        ) from error
    found = False
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        found = True
        name = f"{path}:{number}"
        try:
            example = json.loads(line)
        except ValueError as error:  # JSON and UTF-8 errors both
            raise UserError(
                field, name, f"is not JSON ({error})", "write one JSON object per line, in UTF-8"
            ) from error
        if not isinstance(example, dict):
            raise UserError(field, name, "is not a JSON object", f'write {{"{prompt_key}": ...}} on each line')
        if prompt_key not in example:
            nearest = difflib.get_close_matches(prompt_key, example, n=1)
            hint = f"did you mean data.prompt_key = {nearest[0]!r}?" if nearest else f"its keys are {sorted(example)}"
            raise UserError(field, name, f"has no key {prompt_key!r}", f"add it or set data.prompt_key ({hint})")
        yield _Source(name, example[prompt_key], example, example)
    if not found:
        raise UserError(field, str(path), "has no prompts", "write at least one JSON object into it")


def _read_task(task: ReasoningGym, where: str) -> Iterator[_Source]:
    field = f"{where}.reasoning_gym"
    for i, entry in enumerate(open_task(task, field)):
        # Metadata may hold objects without a lasting text form; question and answer are what the run learns from.
        yield _Source(f"{task.task}[{i}]", entry["question"], dict(entry), [entry["question"], entry["answer"]])


def open_task(task: ReasoningGym, field: str) -> Any:
    """The reasoning_gym dataset of a task. Raises UserError when the task is unknown or refuses its options."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.task not in DATASETS:
        nearest = difflib.get_close_matches(task.task, DATASETS, n=1, cutoff=0.0)
        raise UserError(f"{field}.task", task.task, "is no reasoning_gym task", f"did you mean {nearest[0]!r}?")
    try:
        return reasoning_gym.create_dataset(task.task, size=task.size, seed=task.seed, **task.options)
    except (TypeError, ValueError, AssertionError) as error:  # how tasks refuse arguments
        raise UserError(
            f"{field}.options",
            task.options,
            f"{task.task} refuses them ({error})",
            "see the task's options in reasoning_gym",
        ) from error


def _render(source: _Source, data: Data, tokenizer: Any, where: str) -> tuple[str, list[int]]:
    """The prompt as the model reads it: text and token ids."""
    prompt = source.prompt
    if isinstance(prompt, str) and not data.chat_template:
        if data.system_prompt is not None:
            raise UserError(
                "data.system_prompt",
                data.system_prompt,
                f"{source.name} is plain text, not a chat",
                "set data.chat_template: true",
            )
        text, tokens = prompt, _tokenize(prompt, tokenizer)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked_chat(source, where)
        if data.system_prompt is not None:
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        text = _apply_template(messages, tokenizer, source, where)
        tokens = list(tokenizer.encode(text, add_special_tokens=False))  # the template writes its own special tokens
    if not tokens:
        raise UserError(where, source.name, "is an empty prompt", "remove it or write a prompt")
    return text, tokens


def _tokenize(text: str, tokenizer: Any) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is not None and list(tokenizer.encode("a"))[:1] == [bos] and tokens[:1] != [bos]:
        return [bos, *tokens]
    return list(tokens)


def _checked_chat(source: _Source, where: str) -> list[dict[str, Any]]:
    prompt = source.prompt
    is_chat = isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        for message in prompt
    )
    if not is_chat or not prompt:
        raise UserError(
            where, source.name, "the prompt is neither a text nor a list of chat messages",
            'write a string or [{"role": "user", "content": "..."}]',
        )  # fmt: skip
    return [dict(message) for message in prompt]


def _apply_template(messages: list[dict[str, Any]], tokenizer: Any, source: _Source, where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "model.path", tokenizer.name_or_path, f"its tokenizer has no chat template, and {source.name} is a chat prompt",
            "use a chat model, or plain text prompts with data.chat_template: false",
        )  # fmt: skip
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError) as error:
        raise UserError(
            where, source.name, f"the chat template refuses it ({error})", "check the order and roles of its messages"
        ) from error


def _too_long(source: _Source, length: int, max_prompt_tokens: int, context_limit: int, where: str) -> UserError:
    if length > max_prompt_tokens:
        reason = f"{length} tokens are more than data.max_prompt_tokens = {max_prompt_tokens}"
        return UserError(where, source.name, reason, "shorten or remove it, or raise data.max_prompt_tokens")
    reason = (
        f"{length} tokens are more than the {context_limit} that rollout.max_new_tokens leaves of the model's context"
    )
    return UserError(where, source.name, reason, "shorten or remove it, or lower rollout.max_new_tokens")
