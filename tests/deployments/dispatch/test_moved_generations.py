"""Generations whose gpu-lets close, die, leave the plan or are loaded anew: every stream gets the tokens that an
undisturbed one gets, each once, as long as a gpu-let of its model lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.gpulet.executors.emulated_steps import EmulatedGenerator
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.frames import listener
from tenuto.deployments.wire.peer import Endpoint
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.profiles.generation import StepCost
from tenuto.profiles.networks.generating import Ending, Generator, Sampling, StepRan
from tests.deployments.entry.test_generation import LENGTHS, OPTIONS, SLO, TINY, TURNS, counted_steps
from tests.instruments.acceptor import Acceptor
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S

pytest.importorskip("transformers")

BLOCKS = 24
IDS = ("a", "b", "c")
STEP = StepCost.line(2.0, 0.0, 0.0, 0.0, 0.0)


def plan(
    ids: tuple[str, ...] = IDS,
    blocks: int = BLOCKS,
    *,
    is_real: bool = False,
    step: StepCost = STEP,
    rates: tuple[float, ...] | None = None,
) -> Plan:
    """One model that generates, on a gpu-let for each id; with the requests per second that are planned for each."""
    steps = {} if is_real else {"steps": step.model_dump(mode="json")}
    replica = {"name": "m", "batch_size": 8, "kv_tokens": blocks * 16, **steps}
    real = {"source": "transformers/llama", "options": OPTIONS} if is_real else {}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "g", "type": "cpu" if is_real else "v100"}],
            "gpulets": [
                {"id": each, "gpu": "g", "share_pct": 30, "models": [replica | {"rate_rps": rate}]}
                for each, rate in zip(ids, rates or [None] * len(ids), strict=True)
            ],
            "models": [{"name": "m", "rate_rps": 10, "slo": SLO, "generates": LENGTHS, **real}],
        }
    )


class Stream:
    """A client that waits for tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Ending | Refused | None = None

    def wrote(self, token: int) -> None:
        assert self.end is None
        self.tokens.append(token)

    def ended(self, finish: Ending) -> None:
        assert self.end is None
        self.end = finish

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        del generation
        assert self.end is None
        self.end = refused


class Line:
    """The way to one process of a gpu-let, which can be cut amid whatever runs."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica = replica
        self._ends: list[asyncio.StreamWriter] = []
        self._carrying: set[asyncio.Task[None]] = set()
        self._acceptor: Acceptor | None = None

    async def endpoint(self) -> Endpoint:
        far = await self.replica.endpoint()
        address = f"\0tenuto-line-{id(self)}"
        if self._acceptor is None:

            def make_protocol() -> asyncio.StreamReaderProtocol:
                accept = partial(self._accept, str(far.address))
                return asyncio.StreamReaderProtocol(asyncio.StreamReader(), accept)

            self._acceptor = Acceptor(listener(address), make_protocol)
        return Endpoint(address, far.token)

    async def _accept(self, far: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other, back = await asyncio.open_unix_connection(far)
        self._ends += [writer, back]
        for source, sink in ((reader, back), (other, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
        sink.close()

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        if self._acceptor is not None:
            self._acceptor.close()

    async def close(self) -> None:
        """Let the process end, and carry what it has sent before that."""
        await self.replica.close()
        await asyncio.gather(*self._carrying)
        if self._acceptor is not None:
            self._acceptor.close()


class Room:
    """A dispatcher and its gpu-lets, without a gateway."""

    def __init__(self, *, is_real: bool = False, step: StepCost = STEP) -> None:
        self.is_real, self.step = is_real, step
        self.replicas: dict[str, Line] = {}
        self._ended: list[Line] = []
        self._asked: list[tuple[Stream, OpenGeneration]] = []

        def find(name: str) -> Any:
            async def endpoint() -> Endpoint:
                return await self.replicas[name].endpoint()

            return endpoint

        self.changes = 0  # of which the dispatcher has heard
        self.dispatcher = Dispatcher(
            lambda p, n: make_scheduler("eager", from_plan(p, n)), find, on_change=self._count_change
        )

    def _count_change(self) -> None:
        self.changes += 1

    async def start(self, name: str) -> None:
        for each in Deployment(plan=plan((name,), is_real=self.is_real, step=self.step)).config().gpulets:
            assert each.spec is not None
            self.replicas[name] = Line(await LocalReplica.start(each.spec, each.user_config))

    async def begin(self, ids: tuple[str, ...] = IDS) -> None:
        for name in ids:
            await self.start(name)
        self.dispatcher.apply(plan(ids, is_real=self.is_real))
        await until(self.dispatcher.is_ready)

    def kill(self, name: str) -> None:
        """Let its connections end, without a word, amid whatever runs."""
        replica = self.replicas.pop(name)
        self._ended.append(replica)
        replica.cut()

    async def stop(self, name: str) -> None:
        await self.replicas.pop(name).close()

    def ask(self, prompt: list[int], sampling: Sampling, **bounds: float) -> Stream:
        stream = Stream()
        self._asked.append((stream, self.dispatcher.generate("m", stream, prompt, sampling, **bounds)))
        return stream

    async def fate(self, stream: Stream) -> tuple[str, str | None]:
        """Return the outcome of the stream that ends next, and the rule behind it."""
        await until(lambda: stream.end is not None)
        (ended,) = await self.dispatcher.ended(None, 1)
        return ended.outcome, ended.rule

    @property
    def is_recovered(self) -> bool:
        """Whether every stream has a token again since it lost a gpu-let: two losses without one end a stream."""
        return not any(generation.was_retried for stream, generation in self._asked if stream.end is None)

    def losses(self, name: str) -> int:
        """Return how often the dispatcher has lost a gpu-let."""
        return next(each.lost for each in self.dispatcher.gpulets() if each.id == name)

    def at(self, name: str) -> int:
        """Return how many generations are at a gpu-let."""
        return next(each.generating for each in self.dispatcher.gpulets() if each.id == name)

    async def close(self) -> None:
        await self.dispatcher.close()
        for replica in (*self.replicas.values(), *self._ended):
            await replica.close()


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    made = Room()
    yield made
    await made.close()


def undisturbed(generator: Generator, prompt: list[int], sampling: Sampling) -> list[int]:
    """Return the tokens of a sequence that runs alone to its end."""
    generator.add(0, prompt, sampling)
    tokens = [generator.step([(0, len(prompt))]).tokens[0]]
    tokens += [generator.step([(0, 1)]).tokens[0] for _ in range(sampling.max_tokens - 1)]
    return tokens


def emulated() -> Generator:
    return EmulatedGenerator(BLOCKS, 16, lambda *_: 0.0)


async def disturb(room: Room, draws: random.Random, streams: list[Stream]) -> int:
    """Close, kill, take out of the plan and load anew, always one gpu-let of three, until all streams have ended;
    return how often. The next one has its turn once the dispatcher has heard of the last, which is ready for it until
    then: a stream that is sent to what is gone already would lose two."""
    count = 0
    while any(stream.end is None for stream in streams):
        await asyncio.sleep(draws.uniform(0.0, 0.03))
        name, what = draws.choice(IDS), draws.randrange(4)
        await until(lambda: room.is_recovered)
        rest = tuple(each for each in IDS if each != name)
        count += 1
        losses, changes = room.losses(name), room.changes
        if what < 2:
            if what == 0:
                await room.stop(name)
            else:
                room.kill(name)
            await room.start(name)
            await until(lambda: room.losses(name) > losses)  # noqa: B023
        elif what == 2:
            room.dispatcher.apply(plan(rest, is_real=room.is_real))
            await asyncio.sleep(draws.uniform(0.0, 0.01))
            await room.stop(name)
            await room.start(name)
            room.dispatcher.apply(plan(is_real=room.is_real))
        else:
            blocks = draws.choice((BLOCKS, BLOCKS - 4))
            changed = Deployment(plan=plan((name,), blocks, is_real=room.is_real)).config().gpulets
            await room.replicas[name].replica.reconfigure(changed[0].user_config.to_data())
            await until(lambda: room.changes > changes)  # noqa: B023
        await until(room.dispatcher.is_ready)
    return count


@pytest.mark.parametrize("seed", range(4))
async def test_no_token_is_lost_or_doubled_whatever_happens_to_gpulets(room: Room, seed: int) -> None:
    draws = random.Random(seed)
    await room.begin()
    asked = [
        ([draws.randrange(200) for _ in range(draws.randint(1, 60))], Sampling(draws.randint(20, 200)))
        for _ in range(12)
    ]
    streams = [room.ask(*each) for each in asked]
    async with asyncio.timeout(PATIENCE_S):
        assert await disturb(room, draws, streams)  # on a busy machine they may be few
    for stream, each in zip(streams, asked, strict=True):
        assert stream.end is Ending.LENGTH
        assert stream.tokens == undisturbed(emulated(), *each)
    await until(
        lambda: all(each.replica.executor.generator("m").free_blocks >= BLOCKS - 4 for each in room.replicas.values())
    )


async def test_a_real_model_writes_the_same_wherever_it_goes_on() -> None:
    from tenuto.profiles.networks.language_model import LanguageModel, load_language_model

    network = load_language_model("transformers/llama", seed=3, config=TINY)
    room, draws = Room(is_real=True), random.Random(7)
    await room.begin()
    asked = [
        ([draws.randrange(300) for _ in range(30)], Sampling(60, temperature, 0.9, seed))
        for temperature, seed in ((0.0, 0), (0.0, 0), (1.0, 1), (1.0, -2))
    ]
    streams = [room.ask(*each) for each in asked]
    async with asyncio.timeout(PATIENCE_S):
        assert await disturb(room, draws, streams)  # on a busy machine they may be few
    alone = LanguageModel(network, device="cpu", blocks=BLOCKS, block_tokens=16, max_batch_tokens=64)
    assert [stream.tokens for stream in streams] == [undisturbed(alone, *each) for each in asked]
    await room.close()


async def test_the_last_gpulet_that_closes_goes_on_and_one_that_dies_ends_its_streams(room: Room) -> None:
    await room.begin(("a",))
    request = [1, 2], Sampling(100)
    stream = room.ask(*request)
    await until(lambda: bool(stream.tokens))
    await room.stop("a")
    await until(lambda: stream.end is not None)
    assert (stream.end, stream.tokens) == (Ending.LENGTH, undisturbed(emulated(), *request))
    await room.start("a")
    await until(room.dispatcher.is_ready)
    stream = room.ask(*request)
    await until(lambda: bool(stream.tokens))
    room.kill("a")
    await until(lambda: stream.end is not None)
    assert isinstance(stream.end, Refused)
    assert stream.end.outcome is Outcome.FAILED
    assert "died" in stream.end.reason
    assert "no gpu-let of 'm' is ready" in stream.end.reason
    counters = room.dispatcher.accounts.counters["m"]
    assert (counters.submitted, counters.ok, counters.failed) == (2, 1, 1)


async def test_what_a_gpulet_that_closes_cannot_end_in_time_is_told_so(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.deployments.gpulet.replica.GENERATIONS_END_S", 0.0)
    await room.begin(("a",))
    counted_steps(monkeypatch, room.replicas["a"].replica.executor.generator("m"), at_least_s=0.5)
    stream = room.ask([1, 2], Sampling(100))
    await until(lambda: bool(stream.tokens))
    await room.stop("a")
    assert await room.fate(stream) == ("failed", Rule.LOST)
    assert isinstance(stream.end, Refused)
    assert "no gpu-let of 'm' is ready" in stream.end.reason


async def test_what_kills_every_gpulet_it_comes_to_is_ended(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedGenerator, "step", lambda _self, _chunks: StepRan(0.0))  # no token ever comes
    await room.begin()
    stream = room.ask([1], Sampling(4))
    for _ in range(2):
        await until(lambda: any(room.at(name) for name in room.replicas))
        room.kill(next(name for name in room.replicas if room.at(name)))
    await until(lambda: stream.end is not None)
    assert isinstance(stream.end, Refused)
    assert len(room.replicas) == 1


async def test_streams_of_a_gpulet_whose_step_never_returns_go_on_elsewhere(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(LocalReplica, "end_process", staticmethod(exits.append))
    ids = ("a", "b")
    await room.begin(ids)
    request = [1, 2], Sampling(300)
    streams = [room.ask(*request) for _ in range(4)]
    await until(lambda: all(stream.tokens for stream in streams) and room.at("a") > 0)
    hung, goes_on = room.replicas["a"].replica, threading.Event()
    step = hung.executor.generator("m").step
    monkeypatch.setattr(hung.executor.generator("m"), "step", lambda c: (goes_on.wait(PATIENCE_S), step(c))[1])
    impatient = Deployment(plan=plan(("a",)), hangs_s=0.01).config().gpulets[0]
    await hung.reconfigure(impatient.user_config.to_data())
    await until(lambda: all(stream.end is not None for stream in streams))
    goes_on.set()
    assert [stream.tokens for stream in streams] == [undisturbed(emulated(), *request)] * 4
    assert exits[:1] == [1]


async def test_a_gpulet_whose_dispatcher_is_gone_frees_its_memory_within_two_steps(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await room.begin(("a",))
    generator = room.replicas["a"].replica.executor.generator("m")
    steps = counted_steps(monkeypatch, generator, turns=TURNS)
    stream = room.ask([1] * 30, Sampling(200))
    await until(lambda: bool(stream.tokens))
    room.kill("a")
    before = len(steps)
    await until(lambda: generator.free_blocks == BLOCKS)
    assert len(steps) - before <= 2


async def test_a_removed_model_ends_what_it_has_begun(room: Room) -> None:
    await room.begin(("a",))
    request = [1, 2], Sampling(60)
    stream = room.ask(*request)
    await until(lambda: bool(stream.tokens))
    room.dispatcher.apply(Plan.from_data({"policy": {"name": "test"}, "gpus": [], "gpulets": [], "models": []}))
    await until(lambda: stream.end is not None)
    assert stream.tokens == undisturbed(emulated(), *request)


async def test_each_gpulet_generates_as_much_as_is_planned_for_it() -> None:
    room = Room(step=StepCost.line(60_000.0, 0.0, 0.0, 0.0, 0.0))
    await room.begin()
    room.dispatcher.apply(plan(rates=(30.0, 10.0, 20.0)))
    streams = [room.ask([1], Sampling(9)) for _ in range(12)]
    assert [room.at(name) for name in IDS] == [6, 2, 4]
    assert all(stream.end is None for stream in streams)
    await room.close()


async def test_each_that_is_refused_says_by_which_rule() -> None:
    minute = StepCost.line(60_000.0, 0.0, 0.0, 0.0, 0.0)  # what is to be refused never runs
    room = Room(step=minute)
    await room.begin(("a",))
    for prompt, bounds, outcome, rule in (
        (1, {"ttft_ms": 0.0}, "expired", Rule.TOO_LATE),
        (1, {"ttft_ms": 50_000.0}, "rejected", Rule.FIRST_TOKEN),
        (1, {"tpot_ms": 50_000.0}, "rejected", Rule.FURTHER_TOKENS),
        (BLOCKS * 16, {}, "rejected", Rule.LENGTH),
    ):
        assert await room.fate(room.ask([1] * prompt, Sampling(9), **bounds)) == (outcome, rule)
    await room.close()


async def test_each_that_waits_too_long_is_late_or_is_lost_says_by_which_rule(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await room.begin(("a",))
    before = [room.ask([1], Sampling(250)) for _ in range(8)]  # all places
    await until(lambda: all(stream.tokens for stream in before))
    assert await room.fate(room.ask([1], Sampling(9), ttft_ms=300.0)) == ("expired", Rule.CUT)
    await until(lambda: all(stream.end is not None for stream in before))
    counted_steps(monkeypatch, room.replicas["a"].replica.executor.generator("m"), at_least_s=0.5)  # 2 ms are planned
    assert await room.fate(room.ask([1], Sampling(1), ttft_ms=400.0)) == ("late", Rule.FIRST_TOKEN)
    assert await room.fate(room.ask([1], Sampling(2), tpot_ms=400.0)) == ("late", Rule.FURTHER_TOKENS)
    stream = room.ask([1], Sampling(99))
    await until(lambda: bool(stream.tokens))
    room.kill("a")
    assert await room.fate(stream) == ("failed", Rule.LOST)
