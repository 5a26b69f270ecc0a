"""Language and value models as DeepSpeed sees them: tokens in, per-token numbers out, logits only in chunks.

Sequences are right-padded and attention is causal, so no attention mask is needed: padding comes after every real
token and cannot be seen by it. Index t of every output speaks of token t.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linckia.api.config import Model, Run
from linckia_trainer.experience.seeds import derive_seed
from linckia_trainer.roles.whole_model import load_whole


def model_dtype(model: Model, device: str) -> torch.dtype:
    if model.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if model.dtype == "bfloat16" else torch.float32


def set_determinism(run: Run, device: str) -> None:
    """``run.determinism: strict`` asks for deterministic kernels on GPUs; on CPUs they are so already."""
    if run.determinism == "strict" and device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def load_language_model(model: Model, device: str) -> "TokenLogProbs":
    """The causal LM of ``model.path``, wrapped to give log-probabilities of given tokens."""
    lm = _load_causal_lm(model, device)
    return TokenLogProbs(lm, model.chunk_tokens)


def load_value_model(model: Model, seed: int, device: str) -> "TokenValues":
    """The backbone of ``model.path`` with a scalar head drawn from the run seed."""
    lm = _load_causal_lm(model, device)
    hidden = lm.config.get_text_config().hidden_size
    head = nn.Linear(hidden, 1, dtype=model_dtype(model, device))
    generator = torch.Generator().manual_seed(derive_seed(seed, "value head"))
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, hidden, generator=generator) / (hidden + 1))
        head.bias.zero_()
    return TokenValues(lm.base_model, head)


def _load_causal_lm(model: Model, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    next_step = "give the folder of a causal language model with all its weights"
    lm = load_whole(AutoModelForCausalLM, model.path, "model.path", next_step, dtype=model_dtype(model, device))
    lm.config.use_cache = False
    if model.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lm


class TokenLogProbs(nn.Module):
    """Log-probabilities and entropies of the masked tokens of a batch.

    The output head is applied inside this module's own forward to ``chunk_tokens`` tokens at a time, recomputed in the
    backward pass, so logits of the whole batch never exist at once. Under ZeRO-3 the head's weight is registered as an
    external parameter and so gathered once per pass, whatever the number of chunks on each rank.
    """

    def __init__(self, lm: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        config: Any = lm.config
        self.logit_scale = 1.0 / getattr(config, "logits_scaling", 1.0) * (getattr(config, "logit_scale", None) or 1.0)
        self.logit_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        head = self.head
        if hasattr(head.weight, "ds_id"):  # pragma: no cover - only when built inside deepspeed.zero.Init
            self.register_head()

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.lm.get_output_embeddings()  # type: ignore[operator]
        return head

    def register_head(self) -> None:
        """ZeRO-3: gather the head's weight for this module's whole forward and backward."""
        import deepspeed

        deepspeed.zero.register_external_parameter(self, self.head.weight)
        if self.head.bias is not None:
            deepspeed.zero.register_external_parameter(self, self.head.bias)

    def forward(self, tokens: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """``tokens`` int64 [N,T], ``mask`` bool [N,T] -> (log-probabilities, entropies), float32 [N,T], nats, at ``temperature``.

        Zero outside the mask. The entropy is that of the distribution token t was drawn from.
        """
        hidden = self.lm.base_model(input_ids=tokens, use_cache=False)[0]  # type: ignore[operator]
        wanted = mask[:, 1:]
        states, targets = hidden[:, :-1][wanted], tokens[:, 1:][wanted]
        parts = []
        for start in range(0, max(1, len(targets)), self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            arguments = (states[chunk], targets[chunk], temperature)
            recompute = len(targets) > self.chunk_tokens and torch.is_grad_enabled()
            parts.append(
                checkpoint(self._score, *arguments, use_reentrant=False) if recompute else self._score(*arguments)
            )
        log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        empty = hidden.new_zeros(tokens.shape, dtype=torch.float32)
        where = torch.cat([torch.zeros_like(mask[:, :1]), wanted], dim=1)
        return empty.masked_scatter(where, log_probs), empty.masked_scatter(where, entropies)

    def _score(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(states, self.head.weight, self.head.bias).float() * self.logit_scale
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        all_log_probs = torch.log_softmax(logits / temperature, dim=-1)
        log_probs = all_log_probs.gather(1, targets[:, None]).squeeze(1)
        return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)


class TokenValues(nn.Module):
    """The value of the state before each token."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """``tokens`` int64 [N,T], ``mask`` bool [N,T] -> float32 [N,T]; zero outside the mask."""
        hidden = self.backbone(input_ids=tokens, use_cache=False)[0]
        values = self.head(hidden[:, :-1]).squeeze(-1).float()
        return nn.functional.pad(values, (1, 0)) * mask


def check_head(module: TokenLogProbs) -> None:
    """Compare the chunked head with the model's own logits on a few tokens; ValueError where they differ.

    Catches models whose head does more than a linear map, which would otherwise train on wrong log-probabilities.
    """
    size = module.lm.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]
    tokens = torch.arange(8).remainder(size)[None]
    with torch.no_grad():
        ours, _ = module(tokens, torch.ones_like(tokens, dtype=torch.bool), 1.0)
        logits = module.lm(input_ids=tokens, use_cache=False).logits.float()
    theirs = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None]).squeeze(-1)
    if not torch.allclose(ours[:, 1:], theirs, atol=5e-2 if module.head.weight.dtype == torch.bfloat16 else 1e-3):
        raise ValueError(f"{type(module.lm).__name__}: its output head is not a plain linear map")
