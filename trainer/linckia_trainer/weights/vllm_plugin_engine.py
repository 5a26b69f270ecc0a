"""The gloo receiver as vLLM's worker runs it."""

from dataclasses import dataclass

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.gloo import GlooReceiver


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer listens, and the name of this engine's pair."""

    host: str
    port: int
    key: str
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to come: both sides derive the buckets from it."""

    layout: list[Parameter]
    bucket_bytes: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives all buckets first and loads them in ``finish_weight_update``.

    A transfer that dies on the way so leaves the old weights whole.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    receiver: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.receiver = GlooReceiver(init_info.host, init_info.port, init_info.key, init_info.timeout)

    def start_weight_update(self) -> None:
        self.staged: list[tuple[str, Tensor]] = []

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # nothing runs behind on a CPU: no synchronize

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self.receiver is not None, "init_transfer_engine comes first"
        self.staged = self.receiver.receive(update_info.layout, update_info.bucket_bytes)

    def finish_weight_update(self) -> None:
        # CPU linears hold repacked copies of their weights, so plain load_weights would go stale: reload layer by layer.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(self.staged))
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):  # a tied head is no layer of its own and keeps its old repacked copy
                module.quant_method.process_weights_after_loading(module)
        self.staged = []

    def shutdown(self) -> None:
        self.receiver = None
