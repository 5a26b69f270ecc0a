"""Prompts: the order of a run, what the model reads, and every mistake in the data by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from linckia.api.config import Data, Prompts, ReasoningGym
from linckia.api.errors import UserError
from linckia_trainer.experience.prompts import PromptSet, load_prompts, prompt_at, step_positions


class Letters:
    """A tokenizer that reads one token per character, as far as prompts need one."""

    name_or_path = "letters"
    bos_token_id = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


def load(tmp_path: Path, lines: list[str], tokenizer: Letters | None = None, **data: Any) -> PromptSet:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    settings = Data(train=Prompts(file=str(path)), **data)
    return load_prompts(settings.train, settings, tokenizer or Letters(), context_limit=100)


def test_each_prompt_comes_once_an_epoch_and_the_last_step_is_short() -> None:
    cursor, seen = 0, []
    for _ in range(6):
        positions, cursor, epoch = step_positions(cursor, num_prompts=10, prompts_per_step=4)
        seen.append((len(positions), epoch))
    assert seen == [(4, 0), (4, 0), (2, 0), (4, 1), (4, 1), (2, 1)]
    for epoch in (0, 1):
        order = [prompt_at(position, 10, seed=3, shuffle=True) for position in range(10 * epoch, 10 * epoch + 10)]
        assert sorted(order) == list(range(10))


def test_order_is_seeded_new_each_epoch_and_the_same_everywhere() -> None:
    first = [prompt_at(position, 6, seed=1, shuffle=True) for position in range(6)]
    assert first == [prompt_at(position, 6, seed=1, shuffle=True) for position in range(6)]
    assert first != [prompt_at(position, 6, seed=1, shuffle=True) for position in range(6, 12)]
    assert first != [prompt_at(position, 6, seed=2, shuffle=True) for position in range(6)]
    assert [prompt_at(position, 6, seed=1, shuffle=False) for position in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_plain_prompts_are_read_as_they_stand(tmp_path: Path) -> None:
    found = load(tmp_path, ['{"prompt": "ab", "answer": 1}', "", '{"prompt": "c"}'])
    assert [prompt.text for prompt in found.examples] == ["ab", "c"]
    assert found.examples[0].tokens == [97, 98]
    assert found.examples[0].example == {"prompt": "ab", "answer": 1}


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = Letters(chat_template="{{ messages }}")
    chat = json.dumps({"prompt": [{"role": "user", "content": "hi"}]})
    assert load(tmp_path, [chat], tokenizer).examples[0].text == "<user>hi<assistant>"
    plain = load(tmp_path, ['{"prompt": "hi"}'], tokenizer, chat_template=True, system_prompt="be brief")
    assert plain.examples[0].text == "<system>be brief<user>hi<assistant>"


def test_content_hash_changes_with_any_prompt(tmp_path: Path) -> None:
    one = load(tmp_path, ['{"prompt": "a"}', '{"prompt": "b"}']).content_hash
    assert one == load(tmp_path, ['{"prompt": "a"}', '{"prompt": "b"}']).content_hash
    assert one != load(tmp_path, ['{"prompt": "b"}', '{"prompt": "a"}']).content_hash
    assert one != load(tmp_path, ['{"prompt": "a"}', '{"prompt": "b", "answer": 2}']).content_hash


@pytest.mark.parametrize(
    ("lines", "data", "words"),
    [
        (["", ""], {}, ["data.jsonl", "no prompts"]),
        (['{"prompt": "a"}', '{"prompt": '], {}, ["data.jsonl:2", "not JSON"]),
        (['{"prompt": "a"}', "[1]"], {}, ["data.jsonl:2", "not a JSON object"]),
        (['{"promt": "a"}'], {}, ["data.jsonl:1", "promt"]),
        (['{"prompt": ""}'], {}, ["data.jsonl:1", "empty"]),
        (['{"prompt": 7}'], {}, ["data.jsonl:1", "neither"]),
        (['{"prompt": "a"}', '{"prompt": "abcdef"}'], {"max_prompt_tokens": 5}, ["data.jsonl:2", "6 tokens", "5"]),
        ([json.dumps({"prompt": "x" * 101})], {}, ["data.jsonl:1", "101 tokens", "context"]),
        (['{"prompt": [{"role": "user", "content": "a"}]}'], {}, ["data.jsonl:1", "chat template"]),
        (['{"prompt": "a"}'], {"system_prompt": "b"}, ["data.system_prompt", "chat_template"]),
    ],
)
def test_mistakes_are_named_by_line(tmp_path: Path, lines: list[str], data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, lines, **data)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_bytes_that_are_no_utf_8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    settings = Data(train=Prompts(file=str(path)))
    with pytest.raises(UserError, match=r"data\.jsonl:2.*UTF-8"):
        load_prompts(settings.train, settings, Letters(), 100)


class Beginning(Letters):
    """A tokenizer that puts a beginning-of-sequence token (1) before every text."""

    bos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def test_a_plain_prompt_begins_as_its_tokenizer_begins_texts_and_a_chat_as_its_template_does(tmp_path: Path) -> None:
    assert load(tmp_path, ['{"prompt": "ab"}'], Beginning()).examples[0].tokens == [1, 97, 98]
    chat = json.dumps({"prompt": [{"role": "user", "content": "ab"}]})
    tokens = load(tmp_path, [chat], Beginning(chat_template="{{ messages }}")).examples[0].tokens
    assert tokens == [ord(letter) for letter in "<user>ab<assistant>"]


def test_a_template_that_refuses_a_chat_is_named_by_line(tmp_path: Path) -> None:
    class Strict(Letters):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            raise TemplateError("roles must alternate")

    lines = [json.dumps({"prompt": [{"role": "assistant", "content": "a"}]})]
    with pytest.raises(UserError, match=r"data\.jsonl:1.*roles must alternate"):
        load(tmp_path, lines, Strict(chat_template="{{ messages }}"))


def test_a_missing_file_is_named() -> None:
    settings = Data(train=Prompts(file="/nowhere/data.jsonl"))
    with pytest.raises(UserError, match=r"/nowhere/data\.jsonl"):
        load_prompts(settings.train, settings, Letters(), 100)


def test_reasoning_gym_tasks_are_prompts_too() -> None:
    task = ReasoningGym(task="chain_sum", size=4, seed=1, options={"min_terms": 2, "max_terms": 2})
    settings = Data(train=Prompts(reasoning_gym=task))
    found = load_prompts(settings.train, settings, Letters(), 500)
    assert len(found.examples) == 4
    assert found.examples[0].example["answer"]
    wrong = Data(train=Prompts(reasoning_gym=task.model_copy(update={"task": "chain_sun"})))
    with pytest.raises(UserError, match="chain_sum"):
        load_prompts(wrong.train, wrong, Letters(), 500)
    refused = Data(train=Prompts(reasoning_gym=task.model_copy(update={"options": {"min_terms": 5, "max_terms": 2}})))
    with pytest.raises(UserError, match="options"):
        load_prompts(refused.train, refused, Letters(), 500)
