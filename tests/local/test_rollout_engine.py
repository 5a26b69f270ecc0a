"""A real vLLM engine in this process, against transformers in fp32: what it samples, and which weights it serves."""

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from local.tiny import make_model, write_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linckia.api.load import load_config
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory
from linckia_trainer.groups.member import Identity
from linckia_trainer.roles.rollout import RolloutMember
from linckia_trainer.weights.buckets import Parameter
from linckia_trainer.weights.gloo import GlooSender

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # vLLM's and its imports' own
    "ignore::FutureWarning",
    "ignore::UserWarning",
)

BUCKET_BYTES = 100_000
EQUALS = 12  # the token of "="
PROMPTS = [[2 + (i * 7 + j * 3) % 15 for j in range(33 + i % 5)] for i in range(12)]  # longer than a cached block


class Served:
    """An engine, the transformers model that it has to agree with, and the policy's side of the transfer."""

    def __init__(self, folder: Path) -> None:
        config = load_config(
            write_config(
                folder,
                "engine",
                data={"max_prompt_tokens": 40},
                rollout={
                    "prefix_caching": True,
                    "engine_args": {"block_size": 32},
                    "stop": ["=="],
                    "max_new_tokens": 8,
                    "max_num_seqs": 32,
                },
            ),
            [f"rollout.bucket_bytes={BUCKET_BYTES}"],
        )
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        self.member = RolloutMember(Identity("t", "rollout-0", 1, 0, 1, 1), "cpu", 1, float("inf"))
        self.member.load(config)
        self.weights = dict(self.model.named_parameters())
        layout = [Parameter(name, tuple(one.shape), "float32") for name, one in self.weights.items()]
        self.sender = GlooSender(0, "127.0.0.1", layout, BUCKET_BYTES, 20.0)

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        def shut_down() -> None:
            self.member.broken = RuntimeError("closed")
            self.member.engine.engine_core.shutdown()

        self.member.inbox.ask(shut_down)
        cleanup_dist_env_and_memory()

    def connect(self) -> None:
        invitations = self.sender.invite(["engine"], 1)
        beside = threading.Thread(target=self.sender.connect)
        beside.start()
        self.member.open_transfer(invitations["engine"])
        beside.join()

    def gather(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.weights[name].detach()) for name in names)

    def update(self, version: tuple[int, int], gather: Callable[..., Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Send the weights that ``gather`` gives, while the member receives them."""
        beside = threading.Thread(target=self.sender.send, args=(gather,))
        beside.start()
        try:
            self.member.receive_weights(*version)
        finally:
            beside.join()

    def change(self, scale: float) -> None:
        """Another step of a make-believe training: every parameter moves."""
        with torch.no_grad():
            for one in self.weights.values():
                one.add_(torch.randn_like(one) * scale)

    def sample(self, prompts: list[list[int]], seeds: list[int], temperature: float = 1.0) -> list[Trajectory]:
        """One answer per prompt, in order."""
        self.member.submit([SampleRequest(i, 0, p, seeds[i], temperature) for i, p in enumerate(prompts)])
        found: dict[int, Trajectory] = {}
        while len(found) < len(prompts):
            found |= {one.position: one for one in self.member.take(len(prompts), 10.0)}
        return [found[i] for i in range(len(prompts))]

    def worst_difference(self, answers: list[Trajectory]) -> float:
        """The largest difference, in nats, between the engine's log-probabilities and the model's."""
        return max(float(np.abs(log_probs(self.model, one) - one.log_probs).max()) for one in answers)


def log_probs(model: torch.nn.Module, one: Trajectory) -> np.ndarray:
    tokens = torch.tensor([[*one.prompt_tokens.tolist(), *one.answer_tokens.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[len(one.prompt_tokens) - 1 :].numpy()


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.answer_tokens.tolist() == b.answer_tokens.tolist()
        assert a.log_probs.tobytes() == b.log_probs.tobytes()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tied")
    make_model(folder / "model")
    served = Served(folder)
    yield served
    served.close()


def test_log_probabilities_are_those_of_transformers(tied: Served) -> None:
    tied.member.assume_weights(0, 1)
    answers = tied.sample(PROMPTS, list(range(len(PROMPTS))))
    assert tied.worst_difference(answers) < 1e-4
    greedy = tied.sample(PROMPTS, list(range(len(PROMPTS))), temperature=1e-6)
    for one in greedy:
        tokens = [*one.prompt_tokens.tolist(), *one.answer_tokens.tolist()]
        with torch.no_grad():
            best = tied.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert one.answer_tokens.tolist() == best[len(one.prompt_tokens) - 1 : -1]


def test_an_answer_depends_on_its_seed_and_nothing_else(tied: Served) -> None:
    tied.member.assume_weights(0, 1)
    seeds = [100 + i for i in range(len(PROMPTS))]
    together = tied.sample(PROMPTS, seeds)
    alone = [tied.sample([prompt], [seed])[0] for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    assert_same(together, alone)
    backwards = tied.sample(PROMPTS[::-1], seeds[::-1])[::-1]
    assert_same(together, backwards)
    others = tied.sample(PROMPTS, [seed + 1 for seed in seeds])
    assert any(a.answer_tokens.tolist() != b.answer_tokens.tolist() for a, b in zip(together, others, strict=True))


def test_new_weights_are_served_whole(tied: Served) -> None:
    """Prompts that were cached under the old weights give the new model's log-probabilities, tied head and all."""
    tied.connect()
    for step in (1, 2):
        before = tied.sample(PROMPTS, [7] * len(PROMPTS))
        tied.change(0.05)
        assert tied.worst_difference(before) > 1e-2  # the change matters, so what follows can fail
        tied.update((step, 1), tied.gather)
        after = tied.sample(PROMPTS, [7] * len(PROMPTS))
        assert tied.worst_difference(after) < 1e-4
        assert {(one.weight_step, one.policy_generation) for one in after} == {(step, 1)}


DYING_SENDER = """
import os, pickle, signal, sys
import torch
from linckia_trainer.weights.gloo import GlooSender

layout, bucket_bytes = pickle.load(sys.stdin.buffer)
shapes = {parameter.name: parameter.shape for parameter in layout}
sender = GlooSender(0, "127.0.0.1", layout, bucket_bytes, 20.0)
sys.stdout.buffer.write(pickle.dumps(sender.invite(["engine"], 1)["engine"]))
sys.stdout.close()
assert not sender.connect()
calls = 0

def gather(names):
    global calls
    calls += 1
    if calls == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return ((name, torch.full(shapes[name], 9.0)) for name in names)

sender.send(gather)
"""


def test_a_sender_killed_half_way_leaves_the_old_weights_whole(tied: Served) -> None:
    tied.connect()
    tied.update((3, 1), tied.gather)
    before = tied.sample(PROMPTS, [3] * len(PROMPTS))
    with subprocess.Popen(
        [sys.executable, "-c", DYING_SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        pickle.dump((tied.sender.layout, BUCKET_BYTES), process.stdin)
        process.stdin.close()
        tied.member.open_transfer(pickle.load(process.stdout))
        with pytest.raises(RuntimeError, match="by peer"):
            tied.member.receive_weights(4, 1)
    assert process.returncode == -signal.SIGKILL
    assert tied.member.describe()["weight_version"] is None
    with pytest.raises(RuntimeError, match="is stale"):
        tied.member.submit([SampleRequest(0, 0, [2, 3], 0)])
    tied.member.assume_weights(3, 1)
    assert_same(before, tied.sample(PROMPTS, [3] * len(PROMPTS)))
    tied.change(0.05)
    tied.connect()
    tied.update((4, 1), tied.gather)
    assert tied.worst_difference(tied.sample(PROMPTS, [3] * len(PROMPTS))) < 1e-4


def test_an_answer_keeps_its_stop_string_and_says_how_it_ended(tied: Served) -> None:
    tied.member.assume_weights(4, 1)
    answers = tied.sample(PROMPTS * 100, list(range(len(PROMPTS) * 100)))
    ended = [one for one in answers if one.answer_tokens[-1] == 1]
    cut = [one for one in answers if one.finish == "length"]
    stopped = [one for one in answers if one.finish == "stop" and one.answer_tokens[-1] != 1]
    assert ended
    assert cut
    assert stopped
    for one in stopped:
        spelt = [token for token in one.answer_tokens.tolist() if token < 18]  # the others have no text
        assert spelt[-2:] == [EQUALS, EQUALS]
    assert {one.finish for one in ended} == {"stop"}
    assert {len(one.answer_tokens) for one in cut} == {8}
    assert all("12, 12, " not in str(one.answer_tokens.tolist()) for one in answers)


def test_calls_are_answered_while_a_long_queue_is_worked_on(tied: Served) -> None:
    """Far more prompts than the engine works on at one time, and between its steps it still listens."""
    tied.member.assume_weights(4, 1)
    many = len(PROMPTS) * 60
    tied.member.submit([SampleRequest(i, 0, PROMPTS[i % len(PROMPTS)], i) for i in range(many)])
    left = []
    for call in (
        lambda: tied.member.submit([SampleRequest(many, 0, PROMPTS[0], 1)]),
        lambda: tied.member.wake(["weights"]),
        lambda: tied.member.submit([SampleRequest(many + 1, 0, PROMPTS[1], 1)]),
    ):
        call()
        left.append(tied.member.describe()["unfinished"])
    taken: list[Trajectory] = []
    while len(taken) < many + 2:
        taken += tied.member.take(many, 10.0)
    assert min(left) > many // 2
    assert sorted(one.position for one in taken) == list(range(many + 2))


def test_a_failure_inside_the_engine_surfaces_in_every_call(tied: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of this engine's tests: it does not serve again."""

    def fails() -> None:
        raise ValueError("the engine tripped")

    tied.member.inbox.ask(lambda: monkeypatch.setattr(tied.member.engine, "step", fails))
    tied.member.submit([SampleRequest(0, 0, [2, 3], 0)])
    with pytest.raises(RuntimeError, match="the engine tripped"):
        tied.member.take(1, 10.0)
    with pytest.raises(RuntimeError, match="the engine tripped"):
        tied.member.submit([SampleRequest(1, 0, [2, 3], 0)])


def test_a_folder_that_says_tied_but_holds_a_head_of_its_own(tied: Served, tmp_path: Path) -> None:
    """transformers does not tie there, so the engine must not: neither at first nor after an update."""
    tied.close()
    make_model(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = torch.randn_like(stored["model.embed_tokens.weight"]) * 0.3
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    served = Served(tmp_path)
    try:
        assert "lm_head.weight" in served.weights
        served.member.assume_weights(0, 1)
        assert served.worst_difference(served.sample(PROMPTS, [5] * len(PROMPTS))) < 1e-4
        served.connect()
        served.change(0.05)
        served.update((1, 1), served.gather)
        assert served.worst_difference(served.sample(PROMPTS, [5] * len(PROMPTS))) < 1e-4
    finally:
        served.close()
