"""The reference: log-probabilities under the model the policy started from."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia_trainer.groups.engine import build_inference_engine
from linckia_trainer.groups.model_member import Arrays, ModelMember, micro_batches
from linckia_trainer.roles.language_model import check_head, load_language_model, model_dtype, set_determinism
from linckia_trainer.roles.updating import to_device


class ReferenceMember(ModelMember):
    """One rank of the reference group; ranks share nothing but the batch."""

    def load(self, config: RunConfig) -> None:
        self.config = config
        set_determinism(config.run, self.device)
        torch.set_num_threads(self.threads)
        module = load_language_model(config.model, self.device)
        check_head(module)
        self.progress.tick("load")
        self.module = build_inference_engine(module, self.device, model_dtype(config.model, self.device))

    def offload(self) -> None:
        self.module.to("cpu")

    def reload(self) -> None:
        self.module.to(self.device)

    def log_probs(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """reference_log_probs float32 [n,T] of the masked tokens."""
        assert self.config is not None
        out = np.zeros(arrays["tokens"].shape, np.float32)
        with torch.no_grad():
            for rows, part in micro_batches(arrays, self.config.reference.micro_batch_size):
                batch = to_device(part, self.device)
                values, _ = self.module(batch["tokens"], batch["loss_mask"], self.config.rollout.temperature)
                out[rows, : values.shape[1]] = values.cpu().numpy()
                self.progress.tick("score", values.shape[0])
        return {"reference_log_probs": out}
