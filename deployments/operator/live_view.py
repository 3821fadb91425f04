"""The figures of the live page and of `tenuto status --watch`: the last two minutes of a server. They are sampled only
while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from tenuto.deployments.operator.window import WindowFigures, between
from tenuto.deployments.wire.status import ModelCounts, RequestCounts, SystemStatus, WatchedStatus
from tenuto.placement.cluster import node_of

logger = logging.getLogger("ray.serve")

_EVERY_S = 1.0  # unit: a point of the history
_KEPT = 120  # format: points of the history
_SAMPLES = 12  # format: statuses that are kept: a window and a little more
_WINDOW_S = 10.0  # unit: the window of the figures; long enough for a percentile at some tens of requests per second
_LOOKED_S = 30.0  # limit: sampling ends this long after the last look


class RateHistory(msgspec.Struct, frozen=True):
    """Rates of every model from sample to sample, oldest first; None while the model was not there. `at_s`: seconds
    relative to the last sample."""

    at_s: list[float]
    models: dict[str, ModelHistory]


class ModelHistory(msgspec.Struct, frozen=True):
    """The rates of one model."""

    goodput_rps: list[float | None]
    offered_rps: list[float | None]


class LiveStatus(WatchedStatus, frozen=True, kw_only=True):
    """The document at `GET /live`: the status without its distributions; of its plan only the GPUs, which of them
    are drained, and the idle models; the figures of the last ten seconds, or since the first look; and the history of
    two minutes.
    """

    models: dict[str, ModelCounts]
    applications: dict[str, RequestCounts]
    gpus: list[str]
    drained: list[str]
    idle: list[str]
    window: WindowFigures
    history: RateHistory


class _PlannedGpu(msgspec.Struct):
    id: str
    rack: str | None = None


class _PlannedGpus(msgspec.Struct):
    """The keys of a plan that are read here."""

    gpus: list[_PlannedGpu] = []
    drained: list[str] = []

    def aside(self) -> list[str]:
        """Return the GPUs that are drained, by themselves or with their node or rack."""
        places = set(self.drained)
        return [g.id for g in self.gpus if places & {g.id, node_of(g.id), g.rack}]


class LiveView:
    """Samples a status once a second after the first look, and computes recent figures.

    While nobody looks, nothing is sampled. All methods must be called on one event loop.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[SystemStatus]],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`status` returns the status, `clock` seconds; `sleep` waits for some seconds."""
        self._status = status
        self._clock, self._sleep = clock, sleep
        self._samples: deque[tuple[float, SystemStatus]] = deque(maxlen=_SAMPLES)
        self._points: deque[tuple[float, dict[str, tuple[float, float]]]] = deque(maxlen=_KEPT)
        self._looked_s = clock()
        self._sampler: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()

    async def look(self) -> LiveStatus:
        """Return the present view. The first look begins the sampling and takes a second, as figures need two
        samples."""
        self._looked_s = self._clock()
        async with self._beginning:
            if self._sampler is None or self._sampler.done():
                self._samples.clear()
                self._points.clear()
                await self.sample()
                await self._sleep(_EVERY_S)
                await self.sample()
                self._sampler = asyncio.create_task(self._keep_sampling(), name="live view")
        now_s, status = self._samples[-1]
        # The youngest sample that is a window old, else the oldest.
        old_enough = [sample for sample in self._samples if now_s - sample[0] >= _WINDOW_S]
        before_s, before = old_enough[-1] if old_enough else self._samples[0]
        planned = msgspec.convert(status.plan or {}, _PlannedGpus)
        return LiveStatus(
            **{name: getattr(status, name) for name in WatchedStatus.__struct_fields__},
            models={name: model.counts() for name, model in status.models.items()},
            applications={name: application.counts() for name, application in status.applications.items()},
            gpus=[gpu.id for gpu in planned.gpus],
            drained=planned.aside(),
            idle=[*status.idle],
            window=between(before, status, now_s - before_s),
            history=self._history(),
        )

    async def sample(self) -> None:
        """Take one sample. While somebody looks, this happens once a second."""
        status = await self._status()
        now_s = self._clock()
        if self._samples and now_s > self._samples[-1][0]:
            then_s, then = self._samples[-1]
            figures = between(then, status, now_s - then_s).models
            self._points.append(
                (now_s, {n: (round(f.goodput_rps, 1), round(f.offered_rps, 1)) for n, f in figures.items()})
            )
        self._samples.append((now_s, status))

    async def _keep_sampling(self) -> None:
        while self._clock() - self._looked_s < _LOOKED_S:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.sample()
            except TimeoutError as error:
                logger.warning("the live view has no sample: %s", error or "a dispatcher does not answer")

    def _history(self) -> RateHistory:
        points = list(self._points)
        last_s = points[-1][0] if points else 0.0
        nothing = (None, None)
        by_model = {
            name: [models.get(name, nothing) for _, models in points]
            for name in dict.fromkeys(name for _, models in points for name in models)
        }
        return RateHistory(
            [round(at_s - last_s, 1) for at_s, _ in points],
            {
                name: ModelHistory([goodput for goodput, _ in rates], [offered for _, offered in rates])
                for name, rates in by_model.items()
            },
        )

    def close(self) -> None:
        """Stop sampling."""
        if self._sampler is not None:
            self._sampler.cancel()
