"""The critic: values of states, and the clipped value update."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linckia.api.config import RunConfig
from linckia_trainer.algorithms import losses
from linckia_trainer.groups import engine as ds
from linckia_trainer.groups.engine_errors import NonFiniteError
from linckia_trainer.groups.model_member import Arrays, ModelMember, micro_batches
from linckia_trainer.roles.language_model import load_value_model, model_dtype, set_determinism
from linckia_trainer.roles.updating import Sums, mini_batches, to_device


class CriticMember(ModelMember):
    """One rank of the critic group."""

    def load(self, config: RunConfig) -> None:
        self.config = config
        ds.prepare_backend(self.device)
        set_determinism(config.run, self.device)
        torch.manual_seed(config.run.seed)
        module = load_value_model(config.model, config.run.seed, self.device)
        self.progress.tick("load")
        self.engine = ds.build_trained_engine(
            module,
            config.critic,
            self.device,
            model_dtype(config.model, self.device),
            config.recovery.collective_timeout,
        )

    def values(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """values float32 [n,T]: of the state before each masked token, before this record's update."""
        assert self.config is not None
        out = np.zeros(arrays["tokens"].shape, np.float32)
        self.engine.eval()
        with torch.no_grad():
            for rows, part in micro_batches(arrays, self.config.critic.micro_batch_size):
                batch = to_device(part, self.device)
                values = self.engine(batch["tokens"], batch["loss_mask"])
                out[rows, : values.shape[1]] = values.cpu().numpy()
                self.progress.tick("score", values.shape[0])
        return {"values": out}

    def update(self, arrays: Arrays, step: int, kl_coefficient: float) -> dict[str, float]:
        """The clipped value update on one record's rows of this rank; returns token means over all ranks."""
        assert self.config is not None
        config, group = self.config, self.config.critic
        ds.set_learning_rate(self.engine, ds.learning_rate(group.optimizer, step, config.run.steps))
        self.engine.train()
        sums, norms = Sums(), []
        for mini, denominator in mini_batches(arrays, group, config.algorithm.epochs, config.run.seed, step, self):
            parts = list(micro_batches(mini, group.micro_batch_size))
            for index, (_, part) in enumerate(parts):
                self.check_fence()
                batch = to_device(part, self.device)
                mask = batch["loss_mask"]
                values = self.engine(batch["tokens"], mask)
                loss, metrics = losses.value_loss(
                    values, batch["values"], batch["returns"], mask, config.algorithm.value_clip, denominator
                )
                if not ds.all_finite(loss):
                    ds.discard(self.engine, loss)
                    raise NonFiniteError(f"the value loss of step {step} is not finite")
                sums.add(mask, loss=loss.detach() * denominator, **metrics)
                ds.backward(self.engine, loss, last=index == len(parts) - 1)
                self.progress.tick("update")
            norms.append(ds.step(self.engine))
            self.progress.tick("update")
        return sums.means("critic") | {"critic/grad_norm": float(np.mean(norms))}
