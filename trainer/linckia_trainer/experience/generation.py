"""The generate stage: prompts to the least-loaded engine, finished answers back at once, spooled while the rest runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray

from linckia_trainer import recovery, scaling
from linckia_trainer.experience.prompts import step_positions
from linckia_trainer.experience.seeds import derive_seed
from linckia_trainer.experience.trajectory import SampleRequest, Trajectory
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.groups.group import ActorGroup, Call
from linckia_trainer.log import spool

if TYPE_CHECKING:
    from linckia_trainer.run import Run

Finished = Callable[[list[Trajectory]], None]
TAKE_SECONDS = 2.0
LOOK_SECONDS = 0.2  # how often an engine that is loaded again is looked for


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


@dataclass
class Desk:
    """What one generation of an engine was given and has not answered yet, and the calls to it that are on their way."""

    engine: ActorGroup
    generation: int
    asked: dict[tuple[int, int], SampleRequest] = field(default_factory=dict)
    submits: list[Call] = field(default_factory=list)
    take: Call | None = None


def sample(run: "Run", requests: Iterable[SampleRequest], finished: Finished | None = None) -> list[Trajectory]:
    """Sample every request on the engines that stand; ``finished`` hears of answers as they come.

    What a lost engine has not answered goes to the others at once. An engine that comes back joins when it has the weights.
    """
    queue = deque(requests)
    desks: dict[str, Desk] = {}
    trajectories: list[Trajectory] = []
    while queue or desks:
        for desk in [desk for desk in desks.values() if desk.engine.generation != desk.generation]:
            run.healer.costs.generated_again += take_back(desk, desks, queue)
        scaling.adjust(run)
        recovery.refit(run)
        hand_out(run, queue, desks)
        if not desks:
            recovery.await_engine(run)
            continue
        for desk in await_answers(run, desks, more=bool(queue)):
            try:
                answers = collect(desk)
            except GroupLostError as loss:
                run.healer.report(loss)
                run.healer.costs.generated_again += take_back(desk, desks, queue)
                continue
            trajectories.extend(answers)
            run.count_tokens(sum(len(answer.answer_tokens) for answer in answers))
            if finished is not None:
                finished(answers)
            if not desk.asked:
                del desks[desk.engine.name]
    return trajectories


def take_back(desk: Desk, desks: dict[str, Desk], queue: deque[SampleRequest]) -> int:
    """A lost engine's unanswered requests go to the front of the queue; returns how many."""
    del desks[desk.engine.name]
    queue.extendleft(reversed(desk.asked.values()))
    return len(desk.asked)


def hand_out(run: "Run", queue: deque[SampleRequest], desks: dict[str, Desk]) -> None:
    """Give queued requests to the least-loaded engines that serve, one call per engine."""
    serving = [engine for engine in run.healer.loaded(run.engines) if run.weights.serves(engine, run.log.head())]
    load = {engine.name: len(desks[engine.name].asked) if engine.name in desks else 0 for engine in serving}
    shares: dict[str, list[SampleRequest]] = {engine.name: [] for engine in serving}
    while queue and load:
        name = min(load, key=load.__getitem__)
        if load[name] >= run.config.rollout.max_num_seqs:
            break
        shares[name].append(queue.popleft())
        load[name] += 1
    for engine in serving:
        if share := shares[engine.name]:
            desk = desks.setdefault(engine.name, Desk(engine, engine.generation))
            desk.asked |= {(request.position, request.sample): request for request in share}
            desk.submits.append(engine.start("submit", share))


def await_answers(run: "Run", desks: dict[str, Desk], more: bool) -> list[Desk]:
    """Ask every engine for what it has finished; returns those whose call came back first, if any did for a while."""
    capacity = run.config.rollout.max_num_seqs
    for desk in desks.values():
        if desk.take is None:
            desk.take = desk.engine.start("take", max(1, capacity // 4) if more else capacity, TAKE_SECONDS)
    refs = {ref: desk for desk in desks.values() if desk.take is not None for ref in desk.take}
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=LOOK_SECONDS)
    return [refs[ref] for ref in ready]


def collect(desk: Desk) -> list[Trajectory]:
    """The answers that came back. GroupLostError if the engine is lost."""
    call, desk.take = desk.take, None
    submits, desk.submits = desk.submits, []
    for submit in submits:
        submit.results()  # a refused prompt is an error, not an answer that never comes
    assert call is not None
    answers: list[Trajectory] = call.results()[0]
    for answer in answers:
        del desk.asked[answer.key]
    return answers


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
