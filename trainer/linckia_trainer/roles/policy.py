"""The policy: log-probabilities of what the engines sampled, and the clipped policy update."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from linckia.api.config import RunConfig
from linckia_trainer.algorithms import losses
from linckia_trainer.groups import engine as ds
from linckia_trainer.groups.engine_errors import NonFiniteError
from linckia_trainer.groups.model_member import Arrays, ModelMember, micro_batches
from linckia_trainer.roles.language_model import check_head, load_language_model, model_dtype, set_determinism
from linckia_trainer.roles.updating import Sums, mini_batches, to_device
from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.transfer import Invitation, Sender, make_sender, raise_lost, transfer_backend


class PolicyMember(ModelMember):
    """One rank of the policy group."""

    sender: Sender | None = None

    def load(self, config: RunConfig) -> None:
        self.config = config
        ds.prepare_backend(self.device)
        set_determinism(config.run, self.device)
        torch.manual_seed(config.run.seed)
        module = load_language_model(config.model, self.device)
        check_head(module)
        self.progress.tick("load")
        self.engine = ds.build_trained_engine(
            module,
            config.policy,
            self.device,
            model_dtype(config.model, self.device),
            config.recovery.collective_timeout,
        )
        if config.policy.zero_stage == 3:
            module.register_head()

    def log_probs(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """old_log_probs float32 [n,T] and entropies of the masked tokens, before this record's update."""
        config = self._config
        out = np.zeros(arrays["tokens"].shape, np.float32)
        self.engine.eval()
        with torch.no_grad():
            for rows, part in micro_batches(arrays, config.policy.micro_batch_size):
                batch = to_device(part, self.device)
                values, _ = self.engine(batch["tokens"], batch["loss_mask"], config.rollout.temperature)
                out[rows, : values.shape[1]] = values.cpu().numpy()
                self.progress.tick("score", values.shape[0])
        return {"old_log_probs": out}

    def update(self, arrays: Arrays, step: int, kl_coefficient: float) -> dict[str, float]:
        """PPO's clipped update on one record's rows of this rank; returns token means over all ranks."""
        config = self._config
        ds.set_learning_rate(self.engine, ds.learning_rate(config.policy.optimizer, step, config.run.steps))
        self.engine.train()
        sums, norms = Sums(), []
        for mini, denominator in mini_batches(
            arrays, config.policy, config.algorithm.epochs, config.run.seed, step, self
        ):
            parts = list(micro_batches(mini, config.policy.micro_batch_size))
            for index, (_, part) in enumerate(parts):
                self.check_fence()
                loss = self._loss(to_device(part, self.device), denominator, kl_coefficient, sums)
                if not ds.all_finite(loss):
                    ds.discard(self.engine, loss)
                    raise NonFiniteError(f"the policy loss of step {step} is not finite")
                ds.backward(self.engine, loss, last=index == len(parts) - 1)
                self.progress.tick("update")
            norms.append(ds.step(self.engine))
            self.progress.tick("update")
        return sums.means("policy") | {"policy/grad_norm": float(np.mean(norms))}

    def _loss(self, batch: dict[str, Tensor], denominator: float, kl_coefficient: float, sums: "Sums") -> Tensor:
        algorithm = self._config.algorithm
        mask = batch["loss_mask"]
        log_probs, entropies = self.engine(batch["tokens"], mask, self._config.rollout.temperature)
        loss, metrics = losses.policy_loss(
            log_probs, batch["old_log_probs"], batch["advantages"], mask, algorithm.clip, denominator
        )
        sums.add(mask, loss=loss.detach() * denominator, **metrics)
        bonus, metrics = losses.entropy_loss(entropies, mask, denominator)
        sums.add(None, **metrics)
        if algorithm.entropy:
            loss = loss + algorithm.entropy * bonus
        if algorithm.kl.where == "loss" and "reference_log_probs" in batch:
            penalty, metrics = losses.kl_loss(
                log_probs, batch["reference_log_probs"], mask, algorithm.kl.estimator, denominator
            )
            sums.add(None, **metrics)
            loss = loss + kl_coefficient * penalty
        return loss

    def open_transfer(self, engines: list[str]) -> dict[str, Invitation]:
        """Begin a round of weight transfer with these engines; on rank 0, their invitations."""
        config = self._config
        if self.sender is None:
            self.sender = make_sender(
                transfer_backend(config, self.device),
                self.identity.rank,
                ray.util.get_node_ip_address(),
                [
                    Parameter(name, tuple(getattr(parameter, "ds_shape", parameter.shape)), dtype_name(parameter))
                    for name, parameter in self._named_parameters()
                ],
                config.rollout.bucket_bytes,
                config.recovery.collective_timeout,
            )
        return self.sender.invite(engines, config.rollout.tensor_parallel_size)

    def connect_engines(self) -> None:
        """Meet the invited engines; EnginesLostError names those that did not come."""
        assert self.sender is not None, "open_transfer comes first"
        raise_lost(self.sender.connect())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abandon_engine(self, attempt: int, engine: str) -> None:
        """An invited engine is lost: ``connect_engines`` must not wait for it."""
        self._admit(attempt)
        if self.sender is not None:
            self.sender.abandon(engine)

    def send_weights(self) -> None:
        """Send all weights to the engines of the round. Collective: every rank gathers, rank 0 sends.

        Raises EnginesLostError that names the engines that were lost on the way; the others have the weights then.
        """
        assert self.sender is not None, "open_transfer comes first"
        raise_lost(self.sender.send(self.gather))

    def gather(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by name, gathered from all ranks where ZeRO-3 splits them. Collective."""
        import deepspeed

        wanted = dict(self._named_parameters())
        parameters = [wanted[name] for name in names]
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._config.policy.zero_stage == 3):
            for name, parameter in zip(names, parameters, strict=True):
                yield name, parameter.detach()
        self.progress.tick("sync")

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.engine.module.lm.named_parameters()  # type: ignore[no-any-return]

    @property
    def _config(self) -> RunConfig:
        assert self.config is not None, "load comes first"
        return self.config


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
