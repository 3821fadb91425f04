"""Clockwork: one candidate per batch size, ordered by the latest moment at which each can still be executed."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.batching.core.by_deadline import Queue
from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.gathering import head_first
from tenuto.batching.core.gpulets import Pool
from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.system import System


@dataclass(frozen=True)
class ClockworkOptions(SchedulerOptions):
    """What the sources leave open.

    order: `earliest` takes the candidate whose latest moment comes first, which is its largest executable batch and the
    reading of Clockwork's paper taken here; `latest` takes the one whose latest moment comes last, always a batch of
    one, which is how the goodputs and median batches of 1 in Symphony's table 2 come out.
    sizes: `powers` has candidates of 1, 2, 4, 8, … as Clockwork compiles its models; `all` of every size.
    """

    order: str = field(default="earliest", metadata={"choices": ("earliest", "latest")})
    sizes: str = field(default="powers", metadata={"choices": ("powers", "all")})


class ClockworkScheduler(EagerScheduler):
    """Clockwork (Gujarati et al., OSDI 2020), its inference scheduler on models that are all loaded.

    For each model and each batch size b up to the queue's length there is a candidate with the latest moment
    `d - l(b)` of its first request; candidates past that moment are gone. A free gpu-let takes the first candidate in
    order. Loading models to GPUs and Clockwork's action windows for imprecise workers are not part of it: every
    gpu-let holds its models, and an action is sent when the gpu-let is free, not ahead.
    """

    name = "clockwork"
    summary = "a candidate per batch size, ordered by its latest executable moment"
    options_type = ClockworkOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        self._chosen = options if isinstance(options, ClockworkOptions) else ClockworkOptions()
        super().__init__(system, options)

    def _size(self, queue: Queue[Pool], pool: Pool, limit: int, slack_ms: float) -> int:
        size = super()._size(queue, pool, min(limit, 1) if self._chosen.order == "latest" else limit, slack_ms)
        return 1 << (size.bit_length() - 1) if size > 0 and self._chosen.sizes == "powers" else size

    def _run(self, queue: Queue[Pool], pool: Pool, now: float) -> bool:
        skip, size = self._cut(queue, pool, 1, head_first, now)
        if size:
            size = self._size(queue, pool, size, queue.deadlines[skip] - now)
            self._send(queue, pool, skip, size, now)
        return size > 0

    def _rank(self, queue: Queue[Pool], now: float) -> float:
        if self._chosen.order == "earliest":
            return super()._rank(queue, now)
        return self._quickest_ms(queue) - queue.deadlines[0]  # the greatest latest moment goes first
