"""A sequence-classification model as the reward: the first logit, row by row, whatever the batch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from local import tiny
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from linckia.api.config import Model
from linckia.api.errors import UserError
from linckia.api.load import load_config
from linckia_trainer.experience.batching import object_column
from linckia_trainer.groups.member import Identity, Progress
from linckia_trainer.roles.language_model import load_language_model, load_value_model
from linckia_trainer.roles.reward import RewardMember, RewardModel

PROMPTS = ["sort 312=", "sort 1=", "sort 77="]
ANSWERS = ["123", "1111", ""]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    tiny.make_model(folder)  # for its tokenizer; the model itself is written over
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sized = LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1, **sizes)
    LlamaForSequenceClassification(sized).save_pretrained(folder)
    return folder


def config(tmp_path: Path, model: Path, batch_size: int) -> Path:
    path = tiny.write_config(tmp_path, "reward")
    data = yaml.safe_load(path.read_text())
    data["reward"] = {"model": str(model), "micro_batch_size": batch_size}
    path.write_text(yaml.safe_dump(data))
    return path


def member(tmp_path: Path, model: Path, batch_size: int) -> RewardMember:
    found = RewardMember(Identity("run", "reward", 1, 0, 1, 1), "cpu", 1, float("inf"))
    found.load(load_config(config(tmp_path, model, batch_size)))
    return found


def columns() -> dict[str, np.ndarray]:
    return {
        "prompts": object_column(PROMPTS),
        "answers": object_column(ANSWERS),
        "examples": object_column([{}] * 3),
        "positions": np.arange(3),
        "samples": np.zeros(3, np.int32),
    }


@pytest.mark.parametrize("batch_size", [1, 3])
def test_reward_is_the_first_logit_of_prompt_and_answer(tmp_path: Path, classifier: Path, batch_size: int) -> None:
    scores = member(tmp_path, classifier, batch_size).score(columns())
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    for prompt, answer, reward in zip(PROMPTS, ANSWERS, scores.rewards, strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([tokenizer(prompt + answer)["input_ids"]])).logits[0, 0]
        assert reward == pytest.approx(float(wanted), abs=1e-5)


def test_a_folder_that_is_no_classifier_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"reward\.model"):
        member(tmp_path, empty, 2)


def test_a_causal_lm_whose_head_would_be_random_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "lm")
    with pytest.raises(UserError, match=r"reward\.model.*lacks score\.weight.*at random"):
        member(tmp_path, folder, 2)


def test_a_language_model_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "lm", tied=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = Model(path=str(folder))
    for load in (lambda: load_language_model(model, "cpu"), lambda: load_value_model(model, 1, "cpu")):
        with pytest.raises(UserError, match=r"model\.path.*lacks lm_head\.weight"):
            load()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, classifier: Path) -> None:
    folder = tmp_path / "larger"
    shutil.copytree(classifier, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(40)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"reward\.model.*has \d+ tokens and the model embeds 32"):
        member(tmp_path, folder, 2)


def test_a_beginning_token_that_the_template_wrote_is_not_doubled(tmp_path: Path, classifier: Path) -> None:
    folder = tmp_path / "beginning"
    shutil.copytree(classifier, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<pad>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.save_pretrained(folder)
    asked: list[list[int]] = []
    found = RewardModel(load_config(config(tmp_path, folder, 1)), "cpu", 1, Progress())
    found._logits = lambda rows: asked.extend(rows) or np.zeros(len(rows), np.float32)  # type: ignore[method-assign,func-returns-value]
    assert found.tokenizer("1")["input_ids"][0] == found.tokenizer.bos_token_id == 0
    found.rewards(["sort 1=", "<pad>sort 1="], ["1", "1"], [{}, {}])
    assert asked[0] == asked[1]
    assert asked[0].count(0) == 1
