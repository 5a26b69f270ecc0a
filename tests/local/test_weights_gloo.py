"""Buckets and the gloo pairs: what is sent is what arrives, and one lost engine costs the others nothing."""

import threading
from collections.abc import Iterator

import pytest
import torch

from linckia_trainer.weights.buckets import (
    ALONE_BYTES,
    Parameter,
    bucket_size,
    buckets,
    num_bytes,
    pack,
    pieces,
    unpack,
)
from linckia_trainer.weights.gloo import ENGINE_RANK, TRAINER_RANK, GlooReceiver, GlooSender, gloo_pair
from linckia_trainer.weights.transfer import Invitation, raise_lost

ODD = {
    "scalar": torch.tensor(3.5),
    "one": torch.tensor([7], dtype=torch.int8),
    "prime": torch.arange(13, dtype=torch.bfloat16),
    "matrix": torch.randn(3, 5, 7),
    "half": torch.randn(9).half(),
    "turned": torch.randn(6, 4).t(),  # not contiguous
    "double": torch.randn(2, 1, 3).double(),
    "large": torch.randn(300),
    "alone": torch.randn(ALONE_BYTES // 4 + 4),
    "alone, turned": torch.randn(513, 1024).t(),
    "alone, not a multiple of 16": torch.randn(ALONE_BYTES // 4 + 1),
    "last": torch.randn(17),
}
LAYOUT = [Parameter(name, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in sorted(ODD.items())]
BUCKET_BYTES = 128


def gather(names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, ODD[name]) for name in names)


def assert_whole(received: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in received] == [parameter.name for parameter in LAYOUT]
    for name, tensor in received:
        assert tensor.dtype == ODD[name].dtype
        assert tensor.shape == ODD[name].shape
        assert torch.equal(tensor, ODD[name])


@pytest.mark.parametrize("bucket_bytes", [1, 16, 128, 1 << 23])
def test_packing_there_and_back(bucket_bytes: int) -> None:
    planned = buckets(LAYOUT, bucket_bytes)
    assert [parameter for bucket in planned for parameter in bucket] == LAYOUT
    received = []
    for bucket in planned:
        flat = torch.full((bucket_size(bucket),), 255, dtype=torch.uint8)
        filled = pack(bucket, [ODD[parameter.name] for parameter in bucket], flat)
        assert len(filled) == bucket_size(bucket)
        received += unpack(bucket, filled)
    assert_whole(received)


def test_buckets_break_where_the_next_parameter_no_longer_fits() -> None:
    four = [Parameter(name, (4,), "float32") for name in "abcd"]  # 16 bytes each
    assert [len(bucket) for bucket in buckets(four, 32)] == [2, 2]
    assert [len(bucket) for bucket in buckets(four, 31)] == [1, 1, 1, 1]
    assert [len(bucket) for bucket in buckets(four, 48)] == [3, 1]
    larger = [four[0], Parameter("big", (100,), "float32"), *four[1:]]
    assert [[one.name for one in bucket] for bucket in buckets(larger, 32)] == [["a"], ["big"], ["b", "c"], ["d"]]


def test_a_parameter_takes_its_bytes_rounded_up_to_16() -> None:
    assert [num_bytes(Parameter("x", shape, "bfloat16")) for shape in [(), (8,), (9,), (0, 4)]] == [16, 16, 32, 0]


def test_large_parameters_travel_alone_and_small_ones_together() -> None:
    large, small = (ALONE_BYTES // 4,), (ALONE_BYTES // 4 - 4,)
    shapes = {"a": small, "b": small, "c": large, "d": large, "e": small}
    bucket = [Parameter(name, shape, "float32") for name, shape in shapes.items()]
    assert [[one.name for one in piece] for piece in pieces(bucket)] == [["a", "b"], ["c"], ["d"], ["e"]]


class Engine(threading.Thread):
    """Plays an engine: ``received`` or ``error`` once it has ended."""

    def __init__(self, invitation: Invitation, sets: int = 1) -> None:
        super().__init__(daemon=True)
        self.info = {**invitation.init_info, "timeout": 10.0}
        self.invitation = invitation
        self.sets = sets
        self.received: list[tuple[str, torch.Tensor]] = []
        self.error: Exception | None = None
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            receiver = GlooReceiver(**self.info)
            for _ in range(self.sets):
                self.received = receiver.receive(self.invitation.layout, self.invitation.bucket_bytes)
        except RuntimeError as error:
            self.error = error


class FailingEngine(Engine):
    """Takes one bucket; then it closes its pair, as a process that ends does, or keeps it and takes no more."""

    stalls = False

    def run(self) -> None:
        pair = gloo_pair(**self.info, rank=ENGINE_RANK)
        first = buckets(self.invitation.layout, self.invitation.bucket_bytes)[0]
        pair.recv([torch.empty(bucket_size(first), dtype=torch.uint8)], TRAINER_RANK, 0).wait()
        if self.stalls:
            self.over.wait(20)


class StallingEngine(FailingEngine):
    stalls = True


@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 1 << 23])
def test_two_engines_get_everything_again_and_again(bucket_bytes: int) -> None:
    sender = GlooSender(0, "127.0.0.1", LAYOUT, bucket_bytes, timeout=10.0)
    for engines in (["a", "b"], ["b", "c"]):
        invitations = sender.invite(engines, 1)
        playing = [Engine(invitations[engine], sets=3) for engine in engines]
        assert sender.connect() == {}
        for _ in range(3):
            assert sender.send(gather) == {}
        for engine in playing:
            engine.join(10)
            assert engine.error is None
            assert_whole(engine.received)


@pytest.mark.parametrize("failing", [FailingEngine, StallingEngine])
def test_one_of_two_engines_fails_and_the_other_gets_everything(failing: type[FailingEngine]) -> None:
    sender = GlooSender(0, "127.0.0.1", LAYOUT, BUCKET_BYTES, timeout=10.0 if failing is FailingEngine else 1.0)
    invitations = sender.invite(["well", "ill"], 1)
    ill = failing(invitations["ill"])
    well = Engine(invitations["well"], sets=2)
    assert sender.connect() == {}
    lost = sender.send(gather)
    assert list(lost) == ["ill"]
    with pytest.raises(ConnectionError, match="engine ill: "):
        raise_lost(lost)
    assert sender.send(gather) == {}  # the lost one is not waited for again
    well.join(10)
    ill.over.set()
    ill.join(10)
    assert well.error is None
    assert_whole(well.received)


def test_an_engine_that_never_comes_is_named_and_the_other_is_served() -> None:
    sender = GlooSender(0, "127.0.0.1", LAYOUT, BUCKET_BYTES, timeout=1.0)
    invitations = sender.invite(["well", "absent"], 1)
    well = Engine(invitations["well"])
    assert list(sender.connect()) == ["absent"]
    assert sender.send(gather) == {}
    well.join(10)
    assert_whole(well.received)


def test_an_engine_that_is_lost_before_it_comes_is_not_waited_for() -> None:
    sender = GlooSender(0, "127.0.0.1", LAYOUT, BUCKET_BYTES, timeout=600.0)
    invitations = sender.invite(["well", "absent"], 1)
    well = Engine(invitations["well"])
    told = threading.Timer(0.05, sender.abandon, ["absent"])
    told.start()
    assert sender.connect() == {"absent": "it was lost before it came"}
    assert sender.send(gather) == {}
    well.join(10)
    assert_whole(well.received)


def test_ranks_other_than_0_only_gather() -> None:
    sender = GlooSender(1, "127.0.0.1", LAYOUT, BUCKET_BYTES, timeout=1.0)
    asked: list[list[str]] = []
    assert sender.invite(["a"], 1) == {}
    assert sender.connect() == {}

    def listens(names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(names)
        return gather(names)

    assert sender.send(listens) == {}
    assert asked == [[one.name for one in bucket] for bucket in buckets(LAYOUT, BUCKET_BYTES)]
