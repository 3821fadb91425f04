"""Clockwork: one candidate per batch size. Candidates are ordered by the latest moment at which they can start."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.batching.core.by_deadline import Queue
from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.gpulets import Pool
from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.system import System


@dataclass(frozen=True)
class ClockworkOptions(SchedulerOptions):
    """Where the sources leave something open, these options choose.

    order: `earliest` takes the candidate whose latest moment comes first. That is the largest batch that can run, and
    our reading of Clockwork's paper. `latest` takes the candidate whose latest moment comes last, which is always a
    batch of one. Only so do the goodputs and the median batches of 1 in Symphony's table 2 come out.
    sizes: `powers` has candidates of 1, 2, 4, 8, …, as Clockwork compiles its models; `all` has one of every size.
    """

    order: str = field(default="earliest", metadata={"choices": ("earliest", "latest")})
    sizes: str = field(default="powers", metadata={"choices": ("powers", "all")})


class ClockworkScheduler(EagerScheduler):
    """The inference scheduler of Clockwork (Gujarati et al., OSDI 2020), with all models loaded.

    Each model has a candidate for each batch size b up to the length of its queue. The latest moment of a candidate is
    `d - l(b)`, where d is the deadline of its first request; after that moment the candidate is gone. A free gpu-let
    takes the first candidate in order.

    Two parts of Clockwork are left out. Models are not loaded to GPUs, as every gpu-let holds its models. There are no
    action windows for imprecise workers, as a batch is sent when the gpu-let is free, not ahead.
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
        skip, size = self._cut(queue, pool, 1, now)
        if size:
            size = self._size(queue, pool, size, queue.deadlines[skip] - now)
            self._send(queue, pool, skip, size, now)
        return size > 0

    def _rank(self, queue: Queue[Pool], now: float) -> float:
        if self._chosen.order == "earliest":
            return super()._rank(queue, now)
        return self._quickest_ms(queue) - queue.deadlines[0]  # the greatest latest moment goes first
