"""The generate stage: prompts to the least-loaded engine, finished answers back at once, spooled while the rest runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import ray

from linckia_trainer.experience.prompts import step_positions
from linckia_trainer.experience.seeds import derive_seed
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory
from linckia_trainer.log import spool

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Finished = Callable[[list[Trajectory]], None]
TAKE_SECONDS = 2.0


def generate(run: "Run", step: int) -> list[Trajectory]:
    """All trajectories of a step: those spooled by an earlier attempt, and the rest sampled now."""
    done = spooled(run, step) if step == run.first_step else {}
    requests = [request for request in step_requests(run, step) if (request.position, request.sample) not in done]
    return [*done.values(), *sample(run, requests, Spool(run, step).add)]


def step_requests(run: "Run", step: int) -> list[SampleRequest]:
    """The answers that a step has to sample, by (position, sample). A pure function of the log and the config."""
    data, seed = run.config.data, run.config.run.seed
    positions, _, _ = step_positions(run.carried().cursor, run.num_prompts, data.prompts_per_step)
    return [
        SampleRequest(
            position,
            number,
            run.prompt(position).tokens,
            derive_seed(seed, "sample", position, number),
            run.config.rollout.temperature,
        )
        for position in positions
        for number in range(data.samples_per_prompt)
    ]


def spooled(run: "Run", step: int) -> dict[tuple[int, int], Trajectory]:
    found, warnings = spool.read(run.store, step)
    for warning in warnings:
        run.warn(warning)
    wanted = {(request.position, request.sample) for request in step_requests(run, step)}
    return {key: trajectory for key, trajectory in found.items() if key in wanted}


def sample(run: "Run", requests: Iterable[SampleRequest], finished: Finished | None = None) -> list[Trajectory]:
    """Sample every request on the ready engines; ``finished`` hears of answers as they come."""
    queue = deque(requests)
    capacity = run.config.rollout.max_num_seqs
    busy = [0] * len(run.engines)
    takes: dict[Any, int] = {}
    submits: dict[int, list[Any]] = {}
    trajectories: list[Trajectory] = []
    while queue or any(busy):
        for number, refs in _hand_out(run, queue, busy, capacity).items():
            submits.setdefault(number, []).extend(refs)
        for number, load in enumerate(busy):
            if load and number not in takes.values():
                worth = max(1, capacity // 4) if queue else capacity
                takes[run.engines[number].start("take", worth, TAKE_SECONDS)[0]] = number
        ready, _ = ray.wait(list(takes), num_returns=1)
        for ref in ready:
            number = takes.pop(ref)
            ray.get(submits.pop(number, []))  # a refused prompt is an error, not an answer that never comes
            answers: list[Trajectory] = ray.get(ref)
            busy[number] -= len(answers)
            trajectories.extend(answers)
            run.count_tokens(sum(len(answer.answer_tokens) for answer in answers))
            if finished is not None:
                finished(answers)
    return trajectories


def _hand_out(run: "Run", queue: deque[SampleRequest], busy: list[int], capacity: int) -> dict[int, list[Any]]:
    """Give queued requests to the least-loaded engines, one call per engine; returns the calls by engine."""
    shares: list[list[SampleRequest]] = [[] for _ in busy]
    while queue:
        number = min(range(len(busy)), key=busy.__getitem__)
        if busy[number] >= capacity:
            break
        shares[number].append(queue.popleft())
        busy[number] += 1
    return {number: run.engines[number].start("submit", share) for number, share in enumerate(shares) if share}


class Spool:
    """Writes finished answers behind the step's generation, every ``storage.spool_seconds``."""

    def __init__(self, run: "Run", step: int) -> None:
        self.run = run
        self.step = step
        self.waiting: list[Trajectory] = []
        self.number = 0
        self.last = time.monotonic()

    def add(self, answers: list[Trajectory]) -> None:
        self.waiting.extend(answers)
        if self.waiting and time.monotonic() - self.last >= self.run.config.storage.spool_seconds:
            while not spool.write(self.run.store, self.step, self.run.attempt, self.number, self.waiting):
                self.number += 1
            self.number += 1
            self.waiting = []
            self.last = time.monotonic()


def evaluation_requests(run: "Run") -> list[SampleRequest]:
    """The same answers' seeds at every evaluation, so that scores differ by the policy alone."""
    assert run.held_out is not None
    evaluation, seed = run.config.evaluation, run.config.run.seed
    return [
        SampleRequest(
            position, number, prompt.tokens, derive_seed(seed, "evaluate", position, number), evaluation.temperature
        )
        for position, prompt in enumerate(run.held_out.examples)
        for number in range(evaluation.samples_per_prompt)
    ]
