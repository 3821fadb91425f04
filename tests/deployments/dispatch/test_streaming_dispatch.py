"""The dispatcher over gpu-lets that stream, on a loop whose time jumps: what is won, and what must not be lost."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.measured_times import WayMeter
from tenuto.deployments.wire.messages import BatchRan, GpuletState, Message, RunBatch
from tenuto.deployments.wire.peer import ConnectionEvents, Finder
from tenuto.deployments.wire.tensors import Buffer
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import submit
from tests.instruments.fake_gpulet import state
from tests.instruments.replay import compute_here
from tests.instruments.virtual_loop import VirtualLoop

COPY_IN_MS, COPY_OUT_MS = 0.5, 0.25  # of one request
WIRE_MS = 0.3  # one way
LATENCY = {"alpha_ms": 1.0, "beta_ms": 6.0}
BATCH = 4


def make_plan(*, streaming: bool, rate_rps: float) -> Plan:
    replica = {
        "name": "m",
        "batch_size": BATCH,
        "latency": LATENCY,
        "latency_ms": 10.0,
        "copy_in_ms": COPY_IN_MS,
        "copy_out_ms": COPY_OUT_MS,
    }
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "g", "type": "v100"}],
            "gpulets": [{"id": "a", "gpu": "g", "models": [replica]}],
            "models": [{"name": "m", "rate_rps": rate_rps, "slo_ms": 80, "latency": LATENCY}],
            "streaming": streaming,
        }
    )


class Device:
    """A gpu-let with copy engines on timers; executes in the order of arrival, one batch at a time.

    Without streaming a batch holds it from its first copy to its last. `noise` scales executions.
    """

    shares_memory = is_near = True

    def __init__(
        self, gpulet_id: str, events: ConnectionEvents[GpuletState], *, streams: bool, noise: random.Random | None
    ) -> None:
        self.peer = gpulet_id
        self.state = state(gpulet_id, {"m": BATCH}, {})
        self.is_up = False
        self.executions: list[tuple[float, float]] = []
        self.here = 0
        self.most_here = 0
        self._events = events
        self._streams = streams
        self._noise = noise
        self._in_free = self._free = self._out_free = 0.0

    def start(self) -> None:
        asyncio.get_running_loop().call_soon(self._rise)

    def _rise(self) -> None:
        self.is_up = True
        self._events.peer_connected(self)

    async def stop(self) -> None:
        self.is_up = False

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        del buffers
        asyncio.get_running_loop().call_later(WIRE_MS / 1000.0, self._arrive, message)

    def _arrive(self, message: RunBatch) -> None:
        now_ms = asyncio.get_running_loop().time() * 1000.0
        size = message.size
        into_ms, out_ms = COPY_IN_MS * size, COPY_OUT_MS * size
        execution_ms = LATENCY["alpha_ms"] * size + LATENCY["beta_ms"] - into_ms - out_ms
        if self._noise is not None:
            execution_ms *= self._noise.uniform(0.9, 1.3)
        self.here += 1
        self.most_here = max(self.most_here, self.here)
        if self._streams:
            self._in_free = ready = max(now_ms, self._in_free) + into_ms
            begun = max(ready, self._free)
            self._free = ended = begun + execution_ms
            self._out_free = back = max(ended, self._out_free) + out_ms
            times = (begun, execution_ms, begun - ready, ready - now_ms, back - ended)
        else:
            begun = max(now_ms, self._free)
            self._free = ended = back = begun + into_ms + execution_ms + out_ms
            times = (begun, ended - begun, begun - now_ms, 0.0, 0.0)
        self.executions.append((begun, ended))
        ran = BatchRan(message.number, *times, [(size, [])])
        asyncio.get_running_loop().call_at(back / 1000.0, self._leave)
        asyncio.get_running_loop().call_at((back + WIRE_MS) / 1000.0, self._answered, ran)

    def _leave(self) -> None:
        self.here -= 1

    def _answered(self, ran: BatchRan) -> None:
        self._events.message_came(self, ran, memoryview(b""))


@dataclass
class Run:
    device: Device
    outcomes: dict[str, int] = field(default_factory=dict)
    budget_ms: float = 0.0

    @property
    def ok(self) -> int:
        return self.outcomes.get("ok", 0)

    @property
    def late_part(self) -> float:
        """Of what was executed."""
        late = self.outcomes.get("late", 0)
        return late / (late + self.ok)


@functools.cache  # several tests look at the same run
def serve(scheduler: str, *, streaming: bool, rate_rps: float, seconds: float = 2.0, seed: int | None = None) -> Run:
    """Offer evenly spaced requests and return what became of those of the second half."""
    devices: list[Device] = []
    noise = None if seed is None else random.Random(seed)

    def make_connection(gpulet_id: str, _find: Finder, events: ConnectionEvents[GpuletState]) -> Device:
        devices.append(Device(gpulet_id, events, streams=streaming, noise=noise))
        return devices[-1]

    def build(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler(scheduler, from_plan(plan, network), {})

    async def run() -> Run:
        loop = asyncio.get_running_loop()
        way = WayMeter(response_ms=WIRE_MS)
        dispatcher = Dispatcher(
            build,
            lambda _: lambda: None,
            way=way,
            clock=loop.time,
            make_connection=make_connection,
            compute=compute_here,  # type: ignore[arg-type]
        )
        dispatcher.apply(make_plan(streaming=streaming, rate_rps=rate_rps))
        await asyncio.sleep(0.001)
        futures = []
        took_ms: dict[int, float] = {}
        for number in range(int(seconds * rate_rps)):
            await asyncio.sleep(max(0.0, 0.001 + number / rate_rps - loop.time()))
            future = submit(dispatcher, "m", [b""], reserve_ms=WIRE_MS)
            begin = loop.time()
            future.add_done_callback(
                lambda _, n=number, begin=begin: took_ms.__setitem__(n, (loop.time() - begin) * 1000.0)
            )
            futures.append(future)
        result = Run(devices[0])
        for number, future in enumerate(futures):
            answer = await future
            await asyncio.sleep(0)
            is_late = answer.outcome is Outcome.OK and took_ms[number] > 80.0 + 1e-6
            if number >= len(futures) // 2:
                word = "late" if is_late else str(answer.outcome.word)
                result.outcomes[word] = result.outcomes.get(word, 0) + 1
        delay = way.delay()
        result.budget_ms = delay.ctrl_ms + BATCH * delay.data_ms_per_request
        await dispatcher.close()
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def check_one_at_a_time(device: Device) -> None:
    for (_, ended), (begun, _) in zip(device.executions, device.executions[1:], strict=False):
        assert begun >= ended - 1e-9
    assert device.most_here <= 2


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
def test_streaming_serves_a_load_that_is_too_much_without(scheduler: str) -> None:
    rate_rps = 540.0  # 400 with copies in every batch, 571 with copies hidden
    plain = serve(scheduler, streaming=False, rate_rps=rate_rps)
    streamed = serve(scheduler, streaming=True, rate_rps=rate_rps)
    for run in (plain, streamed):
        check_one_at_a_time(run.device)
        assert set(run.outcomes) <= {"ok", "expired"}  # nothing is late, staged or not
    assert streamed.ok > 1.25 * plain.ok


@pytest.mark.parametrize("streaming", [False, True])
def test_the_simulator_expects_what_is_served(streaming: bool) -> None:
    """With the scheduler that sends ahead; the simulator tells no core early that a gpu-let is free."""
    plan = make_plan(streaming=streaming, rate_rps=540.0)
    core = make_scheduler("deferred", from_plan(plan, NetworkDelay(ctrl_ms=WIRE_MS, response_ms=WIRE_MS)), {})
    times = np.arange(1080) / 540.0 * 1000.0
    result = simulate(core, times, np.zeros(1080, np.int32), duration_s=2.0, warmup_s=1.0)
    served = serve("deferred", streaming=streaming, rate_rps=540.0)
    assert result.goodput_rps == pytest.approx(served.ok, rel=0.05)


@pytest.mark.parametrize("options", [{"copy_in_ms": 3.0}, {"copy_out_ms": -5.0}])
def test_copies_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    data = make_plan(streaming=True, rate_rps=100.0).to_data()
    data["models"][0]["options"] = options
    with pytest.raises(InvalidInputError, match=r"copies of a request.*Correct `copy_in_ms`"):
        from_plan(Plan.from_data(data))


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
def test_copies_are_budgeted_as_part_of_the_way(scheduler: str) -> None:
    run = serve(scheduler, streaming=True, rate_rps=300.0, seconds=1.0)
    assert run.budget_ms == pytest.approx(WIRE_MS + BATCH * (COPY_IN_MS + COPY_OUT_MS))
    assert run.outcomes == {"ok": 150}


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
def test_batches_that_overrun_make_no_more_late_than_without_streaming(scheduler: str) -> None:
    plain = serve(scheduler, streaming=False, rate_rps=540.0, seconds=4.0, seed=1)
    streamed = serve(scheduler, streaming=True, rate_rps=540.0, seconds=4.0, seed=1)
    check_one_at_a_time(streamed.device)
    assert streamed.late_part <= plain.late_part + 0.01
    assert streamed.ok > 1.15 * plain.ok
