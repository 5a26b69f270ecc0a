"""One step of ours, split by stage, against the bare parts it cannot do without. Prints JSON; goal: at most 1.15.

The bare parts run one after the other in processes without Ray, on as many threads as a member of ours has: vLLM's
generate; a forward pass; DeepSpeed's forward, backward and step of the same batches; one raw gloo transfer of the weights and
the engine's repacking of them; one copy of the states. They are added in two ways. ``sum``: each counts once for each model
that does it, as if one process did everything. ``side_by_side``: what ours does in several processes at a time (forward
passes of all models, updates of policy and critic) counts as long as the cores need to get through it; the harder measure.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import realistic

ROUNDS = 3


def timed(action: Callable[[], Any]) -> float:
    """Mean seconds of ``ROUNDS`` calls after one to warm up."""
    action()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        action()
    return (time.perf_counter() - began) / ROUNDS


def bare_engine(folder: str, new_tokens: int, results: Any) -> None:
    """vLLM alone: generate, and the repacking of a whole set of weights."""
    from linckia.api.load import load_config
    from linckia_trainer.experience.trajectory import SampleRequest
    from linckia_trainer.groups.member import Identity
    from linckia_trainer.roles import rollout

    config = load_config(Path(folder, "bench.yaml"))
    os.environ.update(rollout.engine_environment(config, "cpu"))
    member = rollout.RolloutMember(Identity("bare", "rollout-0", 1, 0, 1, 1), "cpu", realistic.THREADS, 900.0)
    member.load(config)
    from vllm import SamplingParams

    engine = member.engine
    request = SampleRequest(0, 0, list(range(2, 2 + realistic.PROMPT_TOKENS)), 1)
    member.broken = RuntimeError("the benchmark drives this engine itself")
    count = 0

    def generate() -> None:
        nonlocal count
        for _ in range(realistic.PROMPTS * realistic.SAMPLES):
            count += 1
            settings = SamplingParams(temperature=1.0, seed=count, max_tokens=new_tokens, logprobs=0, detokenize=False)
            engine.add_request(str(count), {"prompt_token_ids": request.prompt_tokens}, settings)
        while engine.has_unfinished_requests():
            engine.step()

    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    from transformers import AutoModelForCausalLM

    weights = list(AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters())

    def repack() -> None:
        worker.start_weight_update()
        worker.weight_transfer_engine.staged = [(name, one.detach()) for name, one in weights]
        worker.finish_weight_update()

    results.put({"generate": timed(generate), "repacking": timed(repack)})


def bare_trainer(folder: str, new_tokens: int, role: str, results: Any) -> None:
    """DeepSpeed alone, with the policy's model or the critic's: a forward pass, the update, and a copy of the states."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed
    import deepspeed.ops
    import torch
    from torch.distributed import TCPStore
    from transformers import AutoModel, AutoModelForCausalLM

    from linckia_trainer.groups.engine import copy_out

    torch.set_num_threads(realistic.THREADS)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")
    kind = AutoModelForCausalLM if role == "policy" else AutoModel
    model = kind.from_pretrained(Path(folder, "model"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": realistic.MICRO_BATCH,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        },
    )
    rows = realistic.PROMPTS * realistic.SAMPLES
    tokens = torch.randint(2, 18, (rows, realistic.PROMPT_TOKENS + new_tokens))

    def outputs(batch: Any) -> Any:
        """One number a trained token: its log-probability, or what stands for its value."""
        if role == "critic":
            return engine(input_ids=batch, use_cache=False)[0][:, realistic.PROMPT_TOKENS - 1 : -1, 0]
        logits = engine(input_ids=batch, use_cache=False, logits_to_keep=new_tokens + 1).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(2, batch[:, realistic.PROMPT_TOKENS :, None])

    parts = tokens.split(realistic.MICRO_BATCH)

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                outputs(part)

    def update() -> None:
        for part in parts:
            engine.set_gradient_accumulation_boundary(part is parts[-1])
            engine.backward(-outputs(part).mean())
        engine.step()

    found = {"forward": timed(forward), "update": timed(update)}
    states = [one for files in copy_out(engine).values() for one in flat_tensors(files)]
    copies = [one.clone() for one in states]
    found["copy_of_states"] = timed(lambda: [copy.copy_(one) for copy, one in zip(copies, states, strict=True)])
    results.put({f"{role}_{name}": value for name, value in found.items()})


def flat_tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [one for item in inner for one in flat_tensors(item)]


def gloo_side(rank: int, port: int, num_bytes: int, results: Any) -> None:
    import torch

    from linckia_trainer.weights.gloo import gloo_pair

    pair: Any = gloo_pair("127.0.0.1", port, "bare", rank, 600.0)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    spent = timed(lambda: (pair.send([flat], 1, 0) if rank == 0 else pair.recv([flat], 0, 0)).wait())
    if rank == 0:
        results.put({"raw_gloo": spent})


def in_process(target: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """Run ``target`` in a process of its own and give what it puts into its last argument, a queue."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=target, args=(*arguments, results))
    process.start()
    found: dict[str, float] = results.get(timeout=1800)
    process.join()
    return found


def raw_gloo(num_bytes: int) -> dict[str, float]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    sides = [context.Process(target=gloo_side, args=(rank, store.port, num_bytes, results)) for rank in (0, 1)]
    for side in sides:
        side.start()
    found: dict[str, float] = results.get(timeout=600)
    for side in sides:
        side.join()
    return found


def measure(size: str, algorithm: str, steps: int, new_tokens: int) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = str(realistic.THREADS)
    with tempfile.TemporaryDirectory(prefix="linckia-step-") as name:
        folder = Path(name)
        parameters = realistic.make_model(folder / "model", size)
        config = realistic.write_config(folder, algorithm, steps, new_tokens)
        try:
            stages = realistic.seconds(realistic.train(folder, config))
        finally:
            shutil.rmtree(f"/dev/shm/linckia-bench-{os.getpid()}", ignore_errors=True)
        machine = realistic.machine()
        parts = in_process(bare_engine, name, new_tokens)
        for role in ("policy", "critic")[: 1 + (algorithm == "ppo")]:
            parts |= in_process(bare_trainer, name, new_tokens, role)
        parts |= raw_gloo(parameters * 4)
    alone, together = added(parts, len(os.sched_getaffinity(0)))
    return {
        "parameters": parameters,
        "algorithm": algorithm,
        "sequences": realistic.PROMPTS * realistic.SAMPLES,
        "new_tokens": new_tokens,
        "threads": realistic.THREADS,
        "machine": {"during_ours": machine, "during_bare": realistic.machine()},
        "seconds_by_stage": stages,
        "bare_parts": rounded(parts),
        "bare_sum": round(sum(alone.values()), 4),
        "bare_side_by_side": round(sum(together.values()), 4),
        "seconds_over_side_by_side": over(stages, together),
        "ratio_sum": round(stages["step"] / sum(alone.values()), 3),
        "ratio_side_by_side": round(stages["step"] / sum(together.values()), 3),
    }


def added(parts: dict[str, float], cores: int) -> tuple[dict[str, float], dict[str, float]]:
    """The bare seconds of each stage: one thing after the other, and side by side on ``cores``."""

    def stages(forward: float, update: float) -> dict[str, float]:
        return {
            "generate": parts["generate"],
            "score": forward,
            "update": update,
            "sync": parts["raw_gloo"] + parts["repacking"],
            "save": sum(value for name, value in parts.items() if name.endswith("copy_of_states")),
        }

    def side_by_side(seconds: list[float]) -> float:
        return max(max(seconds), sum(seconds) / min(cores, len(seconds)))

    updates = [value for name, value in parts.items() if name.endswith("_update")]
    forwards = [value for name, value in parts.items() if name.endswith("_forward")]
    forwards.append(parts["policy_forward"])  # the reference's
    return stages(sum(forwards), sum(updates)), stages(side_by_side(forwards), side_by_side(updates))


def over(stages: dict[str, float], bare: dict[str, float]) -> dict[str, float]:
    """What each stage of ours takes beyond its bare parts; ``between`` is what lies between the stages."""
    beyond = {name: stages[name] - bare.get(name, 0.0) for name in stages if name != "step"}
    beyond["between"] = stages["step"] - sum(stages[name] for name in beyond)
    return rounded(beyond)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=realistic.SIZES, default="110M")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    shape = (arguments.algorithm, arguments.steps, arguments.new_tokens)
    report: dict[str, Any] = {arguments.size: measure(arguments.size, *shape), "goal": 1.15}
    if arguments.size != "1M":
        report["1M"] = measure("1M", arguments.algorithm, 30, 6)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
