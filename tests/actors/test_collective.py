"""Weights from process to process: to the byte, and whoever dies, hangs, joins or lies is a matter between two."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from troupe.actors import collective, line, pair
from troupe.actors.collective import Collective, Receiver
from troupe.actors.line import Line, Offer
from troupe.actors.pair import Pair
from troupe.actors.settings import RunConfig
from troupe.learner.model import arrays_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, TimedOut
from troupe.protocol.messages import Blob

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["troupe.actors.collective", "troupe.learner.model"])  # torch is imported once


class Put:
    def put(self, value: Any) -> Blob:
        return Blob(value)

    async def get(self, blob: Blob) -> Any:
        return blob.ref


def weights(seed: int, many: int = 40) -> dict[str, Any]:
    """Of several types and shapes; int16 are bfloat16's bits, every pattern of them."""
    dice = np.random.default_rng(seed)
    odd = {
        "bits": np.arange(-(2**15), 2**15, dtype=np.int16).reshape(64, 1024),
        "half": dice.standard_normal((3, 5)).astype(np.float16),
        "scalar": np.array(dice.standard_normal(), np.float32),
        "nothing": np.zeros((0, 7), np.float32),
        "turned": dice.standard_normal((5, 9)).astype(np.float32).T,
        "nan": np.array([np.nan, -0.0, np.inf], np.float32),
    }
    odd["turned"].flags.writeable = False
    return odd | {f"layer.{n}": dice.standard_normal((64, 257)).astype(np.float32) for n in range(many)}


def sent(way: Collective, version: int, tensors: Any) -> Offer:
    offer = way.send(version, tensors).ref
    assert isinstance(offer, Offer)
    return offer


@pytest.fixture
def way() -> Iterator[Collective]:
    made = Collective("gloo", Put())
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Collective]:
    """It takes who is silent for five seconds for lost."""
    made = Collective("gloo", Put(), limit_s=5.0)
    yield made
    made.close()


class Replica:
    """A generator's end in a process of its own. dies: signal that it sends itself after `after` tensors of each version."""

    def __init__(self, dies: int = 0, after: int = 0) -> None:
        self._here, there = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_replica, args=(there, dies, after), daemon=True)
        self.process.start()
        there.close()

    def wants(self, offer: Offer) -> None:
        self._here.send(offer)

    def got(self) -> Any:
        assert self._here.poll(60), "the replica says nothing"
        return self._here.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _replica(pipe: Any, dies: int, after: int) -> None:
    receiver, landed, land = Receiver("generator-1"), 0, Pair._land

    def counted(*args: Any) -> None:
        nonlocal landed
        land(*args)
        landed += 1
        if dies and landed == after:
            os.kill(os.getpid(), dies)

    Pair._land = counted  # type: ignore[method-assign]
    while True:
        offer = pipe.recv()
        try:
            pipe.send(checksum_of(arrays_of(receiver.receive(offer))))
        except Exception as error:
            pipe.send(error)


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made: list[Replica] = []
    yield made
    for replica in made:
        replica.end()


def checksum(receiver: Receiver, offer: Offer) -> str:
    return checksum_of(arrays_of(receiver.receive(offer)))


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_replicas_in_processes_of_their_own_get_every_version_to_the_byte_and_keep_their_groups(
    way: Collective, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    enter = way._enter
    monkeypatch.setattr(way, "_enter", lambda *args: entered.append(args) or enter(*args))
    replicas += [Replica(), Replica()]
    for version in range(3):
        tensors = weights(version)
        offer = sent(way, version, tensors)
        for replica in replicas:
            replica.wants(offer)
        assert [replica.got() for replica in replicas] == [checksum_of(tensors)] * 2
    assert len(entered) == 2


def test_who_comes_later_gets_the_newest_and_who_comes_too_late_for_one_is_told(way: Collective) -> None:
    first, late = Receiver("first"), Receiver("late")
    old = sent(way, 1, weights(1))
    assert checksum(first, old) == checksum_of(weights(1))
    new = sent(way, 2, weights(2))
    assert checksum(late, new) == checksum(first, new) == checksum_of(weights(2))
    with pytest.raises(ActorLost, match="has no version 1: it is at version 2"):
        late.receive(old)
    assert checksum(late, new) == checksum_of(weights(2))
    for receiver in (first, late):
        receiver.close()


def test_nobody_gets_anything_without_the_token(way: Collective) -> None:
    offer = replace(sent(way, 1, weights(1)), token="guessed")
    thief = Line.to(offer, "g", "thief")
    with pytest.raises(ActorLost, match=r"is gone|has closed the connection"):
        thief.ask(1)
        thief.hear(30)


CROWDED = """
import os, resource, socket, time
import numpy as np
from tests.actors.test_collective import Put
from troupe.actors.collective import Collective, Receiver
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
way = Collective("gloo", Put())
offer = way.send(1, {"w": np.arange(9, dtype=np.float32)}).ref
early, free = socket.socket(), os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
early.connect((offer.host, offer.port))
time.sleep(0.5)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
early.close()
print(Receiver("g").receive(offer)["w"].tolist())
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="a process may not have that many here")
def test_a_learner_with_thousands_of_descriptors_which_ran_out_of_them_once_serves_on() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{list(map(float, range(9)))}\n", done.stderr
    assert "a replica that asks for weights cannot be let in: [Errno 24]" in done.stderr


# -- who is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dies", "says"),
    [(signal.SIGKILL, "was lost"), pytest.param(signal.SIGSTOP, "has moved no weights", marks=pytest.mark.slow)],
)
def test_a_replica_that_is_killed_or_stopped_amid_a_transfer_costs_the_others_nothing_and_is_replaced(
    hasty: Collective, replicas: list[Replica], capfd: pytest.CaptureFixture[str], dies: int, says: str
) -> None:
    replicas += [Replica(dies, after=20), Replica()]
    bad, good = replicas
    tensors = weights(5, many=60) | {"large": np.zeros(2_000_000, np.float32)}
    tensors |= {f"more.{n}": np.full(500_000, n, np.float32) for n in range(40)}  # more than any socket holds
    offer = sent(hasty, 5, tensors)
    bad.wants(offer)
    good.wants(offer)
    assert good.got() == checksum_of(tensors)
    if dies == signal.SIGKILL:
        bad.process.join(30)
        assert bad.process.exitcode == -signal.SIGKILL

    newer = weights(6)
    began, offer = time.monotonic(), sent(hasty, 6, newer)
    good.wants(offer)
    assert good.got() == checksum_of(newer) and time.monotonic() - began < 30
    replicas.append(Replica())
    replicas[-1].wants(offer)
    assert replicas[-1].got() == checksum_of(newer)
    heard = ""
    for _ in range(300):  # the learner's thread for it ends, and says of whom and why
        heard += capfd.readouterr().err
        if f"while sending version 5: generator-1 {says}" in heard:
            break
        time.sleep(0.1)
    assert f"while sending version 5: generator-1 {says}" in heard
    if dies == signal.SIGSTOP:  # one that goes on after all finds out, and is served anew
        os.kill(bad.process.pid or 0, signal.SIGCONT)
        assert isinstance(bad.got(), (ActorLost, TimedOut))
        bad.wants(offer)
        assert bad.got() == checksum_of(newer)


@pytest.mark.slow
def test_one_that_announces_itself_and_never_comes_holds_nobody_up(hasty: Collective) -> None:
    offer = sent(hasty, 1, weights(1))
    lines = [Line.to(offer, f"never-{n}", "nobody") for n in range(4)]
    receiver, began = Receiver("somebody"), time.monotonic()
    assert checksum(receiver, offer) == checksum_of(weights(1))
    assert time.monotonic() - began < offer.limit_s, "it waited for the others"
    receiver.close()
    for each in lines:
        assert each.gone(30.0), "the learner has not given up"


def _learner(pipe: Any, dies: int) -> None:
    way, outgoing, count = Collective("gloo", Put(), limit_s=2.0), collective._outgoing, 0

    def some(tensors: Any, backend: str) -> Any:
        nonlocal count
        for tensor in outgoing(tensors, backend):
            count += 1
            if count == 25:
                os.kill(os.getpid(), dies)
            yield tensor

    collective._outgoing = some  # type: ignore[assignment]
    pipe.send(sent(way, 1, weights(1)))
    pipe.recv()


@pytest.mark.parametrize(
    ("dies", "error"), [(signal.SIGKILL, ActorLost), pytest.param(signal.SIGSTOP, TimedOut, marks=pytest.mark.slow)]
)
def test_a_learner_that_is_killed_or_stopped_amid_a_transfer_is_noticed_and_its_successor_serves(
    way: Collective, dies: int, error: type[Exception]
) -> None:
    here, there = _PROCESSES.Pipe()
    learner = _PROCESSES.Process(target=_learner, args=(there, dies), daemon=True)
    learner.start()
    receiver = Receiver("generator-0")
    try:
        assert here.poll(60)
        with pytest.raises(error, match="the learner"):
            receiver.receive(here.recv())
    finally:
        learner.kill()
        learner.join()
    assert checksum(receiver, sent(way, 1, weights(1))) == checksum_of(weights(1))
    receiver.close()


def test_a_learner_that_cannot_be_reached_or_does_not_answer_is_named(way: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = sent(way, 1, weights(1))
    receiver = Receiver("generator-0")
    with socket.socket() as closed:
        closed.bind((offer.host, 0))
        with pytest.raises(ActorLost, match=rf"the learner at {offer.host}:\d+ cannot be reached"):
            receiver.receive(replace(offer, port=closed.getsockname()[1]))
    monkeypatch.setattr(line, "CONNECT_S", 0.3)
    with socket.socket() as silent:
        silent.bind((offer.host, 0))
        silent.listen()
        to = Line.to(replace(offer, port=silent.getsockname()[1]), "g", "generator-0")
        with pytest.raises(TimedOut, match=r"has not answered for 0\.3 s"):
            to.ask(1)
        to.close()


def test_many_at_once_are_served_at_once_and_none_of_the_threads_stays(way: Collective) -> None:
    before = threading.active_count()
    tensors = weights(1)
    offer, receivers = sent(way, 1, tensors), [Receiver(f"generator-{n}") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda r: checksum(r, offer), receivers)) == [checksum_of(tensors)] * 8
    for receiver in receivers:
        receiver.close()
    way.close()
    for _ in range(300):
        if threading.active_count() <= before:
            return
        time.sleep(0.05)
    pytest.fail(f"left: {[thread.name for thread in threading.enumerate()]}")


# -- what is refused ---------------------------------------------------------------------------------------------------

GPUS = {"learner": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"generator": {"transfer": "nccl"}}, r"learner.device = 'auto'.*set generator.transfer = 'gloo'"),
        (GPUS | {"generator": {"transfer": "nccl"}}, r"generator.device = 'cpu'.*set it to 'cuda'"),
        (
            GPUS | {"generator": {"transfer": "nccl", "engine": "sglang", "device": "cuda"}},
            "set sglang_weights = 'distributed'",
        ),
        (GPUS | {"generator": {"transfer": "nccl", "engine": "vllm", "device": "cuda"}}, "set transfer = 'gloo'"),
        ({"generator": {"engine": "sglang", "sglang_weights": "distributed"}}, "set transfer = 'gloo'"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_set(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(recipe)


def test_what_goes_together_is_taken() -> None:
    for generator in (
        {"transfer": "gloo"},
        {"transfer": "gloo", "engine": "sglang"},
        {"transfer": "gloo", "engine": "vllm"},
        {"transfer": "nccl", "device": "cuda"},
        {"transfer": "nccl", "device": "cuda", "engine": "sglang", "sglang_weights": "distributed"},
    ):
        RunConfig.model_validate(GPUS | {"generator": generator})


def test_a_process_without_nccl_says_so_when_it_is_to_send() -> None:
    if pair.dist.is_nccl_available() and pair.torch.cuda.is_available():
        pytest.skip("this process has NCCL and a GPU")
    with pytest.raises(ConfigError, match=r"has no NCCL, or sees no CUDA GPU.*set generator.transfer = 'gloo'"):
        Collective("nccl", Put()).send(1, weights(1))
