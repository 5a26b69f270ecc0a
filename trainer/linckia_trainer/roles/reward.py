"""The reward group: a Python function, a task's own verifier or a sequence-classification model, in actors of its own."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia_trainer.experience.rewards import RewardFunction, Scores, load_function, score, verifier
from linckia_trainer.groups.member import Progress
from linckia_trainer.groups.model_member import Arrays, ModelMember
from linckia_trainer.roles.whole_model import load_whole


class RewardMember(ModelMember):
    """One rank of the reward group. A function or verifier loads nothing heavy."""

    def prepare(self, config: RunConfig) -> None:
        if config.reward.model is not None:
            super().prepare(config)

    def load(self, config: RunConfig) -> None:
        self.config = config
        if config.reward.model is not None:
            self.function: RewardFunction = RewardModel(config, self.device, self.threads, self.progress).rewards
        elif config.reward.function is not None:
            self.function = load_function(config.reward.function)
        else:
            assert config.data.train.reasoning_gym is not None  # checked with the config
            self.function = verifier(config.data.train.reasoning_gym)

    def score(self, columns: Arrays) -> Scores:
        """Rewards of rows with the columns prompts, answers, examples, positions, samples. Raises RewardError."""
        assert self.config is not None
        keys = [
            (int(position), int(number))
            for position, number in zip(columns["positions"], columns["samples"], strict=True)
        ]
        texts = [list(columns[name]) for name in ("prompts", "answers", "examples")]
        scores = score(self.function, texts[0], texts[1], texts[2], self.config.reward.weights, keys)
        self.progress.tick("score", len(keys))
        return scores


class RewardModel:
    """A sequence-classification model; its first logit is the reward.

    It reads prompt and answer as text through a tokenizer of its own, so its vocabulary need not be the policy's.
    """

    def __init__(self, config: RunConfig, device: str, threads: int, progress: Progress) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(threads)
        path = config.reward.model
        assert path is not None
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            next_step = "give a folder that was saved as a sequence-classification model, head and all"
            model = load_whole(AutoModelForSequenceClassification, path, "reward.model", next_step)
            self.model = model.to(device).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = f"it is no sequence-classification model with a tokenizer ({str(error).splitlines()[0]})"
            raise UserError("reward.model", path, reason, "give a folder that holds both") from error
        vocabulary = self.model.config.get_text_config().vocab_size
        if len(self.tokenizer) > vocabulary:
            reason = f"its tokenizer has {len(self.tokenizer)} tokens and the model embeds {vocabulary}"
            raise UserError("reward.model", path, reason, "save the tokenizer that belongs to the model")
        self.batch_size = config.reward.micro_batch_size
        self.device = device
        self.progress = progress
        self.name = Path(path).name

    def rewards(self, prompts: list[str], answers: list[str], examples: list[dict[str, Any]]) -> list[float]:
        """The first logit for each prompt + answer."""
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        rows = [self._tokens(text) for text in texts]
        found: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            found += self._logits(rows[start : start + self.batch_size]).tolist()
            self.progress.tick("score")
        return found

    def _tokens(self, text: str) -> list[int]:
        """A prompt that a chat template has rendered may begin with the token that the tokenizer puts before every text."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        first = self.tokenizer.bos_token_id
        return tokens[1:] if first is not None and tokens[:2] == [first, first] else tokens

    def _logits(self, rows: list[list[int]]) -> NDArray[np.float32]:
        import torch

        width = max(len(row) for row in rows)
        # Such models find a row's last token by the pad token's id, which may also be a real one: ask row by row then.
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None:
            return np.array([self._forward(torch.tensor([row]))[0] for row in rows], np.float32)
        tokens = torch.full((len(rows), width), pad)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(width)[None] < lengths[:, None]).long()
        return self._forward(tokens, mask)

    def _forward(self, tokens: Any, mask: Any = None) -> NDArray[np.float32]:
        import torch

        with torch.no_grad():
            mask = None if mask is None else mask.to(self.device)
            logits = self.model(input_ids=tokens.to(self.device), attention_mask=mask).logits
        found: NDArray[np.float32] = logits[:, 0].float().cpu().numpy()
        return found
