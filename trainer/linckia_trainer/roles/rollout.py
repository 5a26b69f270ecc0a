"""A rollout engine: vLLM inside a Ray actor, driven by a thread so that each answer comes back when it is finished."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linckia.api.config import RunConfig
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory
from linckia_trainer.groups.member import Identity
from linckia_trainer.groups.model_member import ModelMember
from linckia_trainer.roles.inbox import Inbox
from linckia_trainer.weights.own_head import has_own_head
from linckia_trainer.weights.transfer import Invitation, receiver, transfer_backend
from linckia_trainer.weights.vllm_plugin import BACKEND as GLOO
from linckia_trainer.weights.vllm_plugin import register


class RolloutMember(ModelMember):
    """One vLLM engine. It serves a weight version only while it holds all of it, and refuses prompts while stale."""

    def __init__(self, identity: Identity, device: str, threads: int, orphan_timeout: float) -> None:
        super().__init__(identity, device, threads, orphan_timeout)
        self.inbox = Inbox()  # the engine belongs to its thread; whoever wants something of it asks there
        self.changed = threading.Condition()
        self.asked: dict[str, SampleRequest] = {}
        self.finished: list[Trajectory] = []
        self.version: tuple[int, int] | None = None
        self.broken: Exception | None = None
        self.torn = False  # its weights are neither the old nor the new ones
        self.updates: Callable[[], Iterator[dict[str, Any]]] | None = None

    def prepare(self, config: RunConfig) -> None:
        for name, value in engine_environment(config, self.device).items():
            os.environ[name] = value
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    def load(self, config: RunConfig) -> None:
        self.config = config
        self.prepare(config)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._use_threads()
        register()
        self.progress.tick("load")  # the imports are over: vLLM's take as long as many a model
        arguments = engine_arguments(config, self.device, context_length(config.model.path))
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        threading.Thread(target=self._drive, name="engine", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        unfinished = len(self.asked)
        # Whatever call waits meanwhile, an engine with unfinished prompts generates, or should.
        generating = {"stage": "generate"} if unfinished else {}
        return {"weight_version": self.version, "unfinished": unfinished, **generating}

    def submit(self, requests: list[SampleRequest]) -> None:
        """Start sampling; RuntimeError while the engine is stale."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self.config is not None
        rollout = self.config.rollout

        def add() -> None:
            self._check()
            if self.version is None:
                raise RuntimeError(f"{self.identity.name} is stale: it has no whole set of weights to serve")
            for request in requests:
                name = f"{request.position}/{request.sample}/{request.seed}"
                self.asked[name] = request
                settings = SamplingParams(
                    temperature=request.temperature,
                    top_p=rollout.top_p,
                    top_k=rollout.top_k,
                    seed=request.seed,
                    max_tokens=rollout.max_new_tokens,
                    stop=list(rollout.stop),
                    include_stop_str_in_output=True,
                    logprobs=0,
                    skip_special_tokens=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,  # only whole answers travel
                    detokenize=bool(rollout.stop),  # texts are made by whoever needs them
                )
                self.engine.add_request(name, {"prompt_token_ids": request.prompt_tokens}, settings)

        self.inbox.ask(add)

    def take(self, max_count: int, wait_seconds: float) -> list[Trajectory]:
        """All answers finished so far; waits until they are ``max_count``, none is unfinished or the time is over."""
        deadline = time.monotonic() + wait_seconds
        with self.changed:
            while len(self.finished) < max_count and self.asked and (left := deadline - time.monotonic()) > 0:
                self._check()
                self.changed.wait(left)
            taken, self.finished = self.finished, []
        self._check()
        return taken

    def settle(self) -> None:
        """Drop every prompt and answer of an earlier attempt, which has spooled what it took. RuntimeError if torn."""

        def drop() -> None:
            self._check_whole()
            self.engine.abort_request(list(self.asked))
            with self.changed:
                self.asked, self.finished = {}, []

        self.inbox.ask(drop)

    def assume_weights(self, step: int, policy_generation: int) -> None:
        """Serve the weights that the engine holds as this version: the model folder's own, or what came last."""
        self._check_whole()
        self.version = (step, policy_generation)

    def open_transfer(self, invitation: Invitation) -> None:
        """Join a round of weight transfer; the policy connects at the same time."""
        assert self.config is not None
        timeout = self.config.recovery.collective_timeout
        # Ours stages all buckets before it touches a weight; vLLM's own load what they get at once.
        self.staged = invitation.backend == GLOO

        def connect() -> None:
            if self.updates is not None:
                self.engine.collective_rpc("shutdown_weight_transfer_engine")
            self.updates = receiver(invitation, timeout)
            self.engine.collective_rpc("init_weight_transfer_engine", args=(dict(invitation.init_info),))

        self.inbox.ask(connect)

    def receive_weights(self, step: int, policy_generation: int) -> None:
        """Take the policy's weights. The engine is stale until all of them are in place.

        A transfer over gloo that dies leaves the old weights whole; any other leaves an engine that has to be started
        again.
        """

        def receive() -> None:
            assert self.updates is not None, "open_transfer comes first"
            self._check_whole()
            self.version = None
            self.torn = not self.staged
            self.engine.collective_rpc("start_weight_update")
            for update in self.updates():
                self.engine.collective_rpc("update_weights", args=(update,))
                self.progress.tick("sync")
            self.torn = True
            self.engine.collective_rpc("finish_weight_update")
            self.engine.reset_prefix_cache()  # cached keys and values are those of the old weights
            self.torn = False
            self.version = (step, policy_generation)

        self.inbox.ask(receive)

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory to training (GPU only)."""
        self.inbox.ask(lambda: self.engine.sleep(level))

    def wake(self, tags: list[str] | None = None) -> None:
        self.inbox.ask(lambda: self.engine.wake_up(tags))

    def _drive(self) -> None:
        self._use_threads()
        while True:
            self.inbox.serve(wait=not self._busy())
            if self._busy():
                self._step()

    def _busy(self) -> bool:
        return self.broken is None and self.engine.has_unfinished_requests()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it is has to surface in the next call, not hang it
            with self.changed:
                self.broken = error
                self.changed.notify_all()
            return
        self.progress.tick("generate")
        self._collect(outputs)

    def _collect(self, outputs: list[Any]) -> None:
        done = [output for output in outputs if output.finished]
        if done:
            with self.changed:
                self.finished += [self._trajectory(output) for output in done]
                self.changed.notify_all()

    def _trajectory(self, output: Any) -> Trajectory:
        request = self.asked.pop(output.request_id)
        assert self.version is not None
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        log_probs = [chosen[token].logprob for token, chosen in zip(tokens, answer.logprobs, strict=True)]
        return Trajectory(
            request.position,
            request.sample,
            np.array(request.prompt_tokens, np.int32),
            np.array(tokens, np.int32),
            np.array(log_probs, np.float32),
            "stop" if answer.finish_reason == "stop" else "length",
            *self.version,
        )

    def _check_whole(self) -> None:
        self._check()
        if self.torn:
            raise RuntimeError(f"{self.identity.name} is torn: a weight transfer broke off; start it again")

    def _use_threads(self) -> None:
        """OpenMP counts threads per calling thread, and vLLM's CPU attention insists on one count everywhere."""
        import torch

        if self.device == "cpu":
            torch.set_num_threads(self.threads)

    def _check(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"{self.identity.name}: the engine failed: {self.broken}") from self.broken


def engine_environment(config: RunConfig, device: str) -> dict[str, str]:
    """Environment of vLLM, to be set before it is imported."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # Compiling costs 20 s and gains nothing at CPU sizes; pinned threads would put all engines on the same cores.
        variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if Path(config.model.path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def engine_arguments(config: RunConfig, device: str, context: int) -> dict[str, Any]:
    """vLLM's EngineArgs; ``rollout.engine_args`` wins over all of it."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": {"auto": "bfloat16" if device == "cuda" else "float32"}.get(config.model.dtype, config.model.dtype),
        "max_model_len": min(context, config.data.max_prompt_tokens + rollout.max_new_tokens),
        "max_num_seqs": rollout.max_num_seqs,
        "seed": config.run.seed,
        "enforce_eager": rollout.enforce_eager or device == "cpu",
        "enable_prefix_caching": rollout.prefix_caching,
        # Of the distribution that was sampled from; with top_p or top_k vLLM means that of the kept tokens.
        "logprobs_mode": "raw_logprobs" if rollout.temperature == 1 else "processed_logprobs",
        "disable_log_stats": True,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "weight_transfer_config": {"backend": transfer_backend(config, device)},
    }
    if has_own_head(Path(config.model.path)):
        arguments["hf_overrides"] = {"tie_word_embeddings": False}
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = rollout.kv_cache_bytes
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.placement.colocation == "all"
        if rollout.tensor_parallel_size > 1:
            arguments["distributed_executor_backend"] = "ray"
    return arguments | rollout.engine_args


def context_length(path: str) -> int:
    """Tokens that the model's positions reach."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings)
