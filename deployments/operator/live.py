"""What the live page and `tenuto top` show: the last two minutes of a server, sampled while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tenuto.deployments.operator.window import between

logger = logging.getLogger("ray.serve")

_EVERY_S = 1.0
_KEPT = 120  # points of the history
_SAMPLES = 12  # statuses; a window and a little
_WINDOW_S = 10.0  # of the figures; long enough for a percentile at some tens of requests per second
_LOOKED_S = 30.0  # sampling ends that long after the last look

Status = Mapping[str, Any]


class LiveView:
    """Samples a status once a second from the first look on, and says what happened lately.

    Nobody looks: nothing is sampled. All methods must be called on one event loop.
    """

    def __init__(self, status: Callable[[], Awaitable[Status]], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take what returns the status, and a clock in seconds."""
        self._status = status
        self._clock = clock
        self._samples: deque[tuple[float, Status]] = deque(maxlen=_SAMPLES)
        self._points: deque[tuple[float, dict[str, tuple[float, float]]]] = deque(maxlen=_KEPT)
        self._looked_s = clock()
        self._sampler: asyncio.Task[None] | None = None

    async def look(self) -> dict[str, Any]:
        """Return the status without its plan, the figures of the last ten seconds and the history of two minutes.

        `plan` of the status is replaced by `plan_key`, which changes with it: a page asks for a plan when it is new.
        """
        self._looked_s = self._clock()
        if self._sampler is None or self._sampler.done():
            self._samples.clear()
            self._points.clear()
            await self.sample()
            self._sampler = asyncio.create_task(self._keep_sampling(), name="live view")
        now_s, status = self._samples[-1]
        started_s = status.get("uptime_s") or 1.0
        before_s, before = self._earlier(now_s)
        seconds = now_s - before_s if before is not None else max(_EVERY_S, started_s)
        shown = {key: value for key, value in status.items() if key != "plan"}
        models = {name: _without_histograms(model) for name, model in status["models"].items()}
        return {
            **shown, "models": models, "window": between(before, status, seconds).to_data(), "history": self._history(),
        }  # fmt: skip

    async def sample(self) -> None:
        """Take one sample; while somebody looks, that is done once a second."""
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

    def _earlier(self, now_s: float) -> tuple[float, Status | None]:
        """Return the youngest sample that is a window old, else the oldest that is not the last one."""
        older = [sample for sample in self._samples if sample[0] < now_s]
        if not older:
            return now_s, None
        old_enough = [sample for sample in older if now_s - sample[0] >= _WINDOW_S]
        return old_enough[-1] if old_enough else older[0]

    def _history(self) -> dict[str, Any]:
        """Return goodput and offered rate of every model from sample to sample, oldest first."""
        points = list(self._points)
        last_s = points[-1][0] if points else 0.0
        names = {name: None for _, models in points for name in models}
        return {
            "at_s": [round(at_s - last_s, 1) for at_s, _ in points],
            "models": {
                name: {
                    "goodput_rps": [models[name][0] if name in models else None for _, models in points],
                    "offered_rps": [models[name][1] if name in models else None for _, models in points],
                }
                for name in names
            },
        }

    def close(self) -> None:
        """Stop sampling."""
        if self._sampler is not None:
            self._sampler.cancel()


def _without_histograms(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if not (isinstance(value, Mapping) and "le" in value)}
