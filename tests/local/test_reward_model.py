"""A sequence-classification model as the reward: the first logit, row by row, whatever the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from local import tiny
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from linckia.api.errors import UserError
from linckia.api.load import load_config
from linckia_trainer.experience.batching import object_column
from linckia_trainer.groups.member import Identity
from linckia_trainer.roles.reward import RewardMember

PROMPTS = ["sort 312=", "sort 1=", "sort 77="]
ANSWERS = ["123", "1111", ""]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    tiny.make_model(folder)  # for its tokenizer; the model itself is written over
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def member(tmp_path: Path, model: Path, batch_size: int) -> RewardMember:
    path = tiny.write_config(tmp_path, "reward")
    config = yaml.safe_load(path.read_text())
    config["reward"] = {"model": str(model), "micro_batch_size": batch_size}
    path.write_text(yaml.safe_dump(config))
    found = RewardMember(Identity("run", "reward", 1, 0, 1, 1), "cpu", 1, 900.0)
    found.load(load_config(path))
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
