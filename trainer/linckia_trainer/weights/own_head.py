"""A folder that says its output head is tied to the embedding, yet holds a head of its own.

transformers then does not tie (``PreTrainedModel.tie_weights``), vLLM does and drops the head: the engine would sample
from another model than the one that is trained. So the engine is told not to tie.
"""

import json
from pathlib import Path
from typing import Any

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def has_own_head(folder: Path) -> bool:
    """Whether the folder's config ties head and embedding while its safetensors hold two different ones."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    settings = json.loads(config.read_text())
    if not settings.get("tie_word_embeddings", settings.get("text_config", {}).get("tie_word_embeddings", False)):
        return False
    tensors = [stored for path in sorted(folder.glob("*.safetensors")) for stored in _ends(path)]
    heads = [tensor for name, tensor in tensors if name == HEAD]
    embeddings = [tensor for name, tensor in tensors if name != HEAD]
    return any(not bool((head == embedding).all()) for head in heads for embedding in embeddings)


def _ends(path: Path) -> list[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        names = [name for name in stored.keys() if name == HEAD or name.endswith(EMBEDDING)]  # noqa: SIM118
        return [(name, stored.get_tensor(name)) for name in names]
