"""Batches of requests that vary in size, sorted and cut into buckets so that all that waits takes the least time.

TurboTransformers (Fang, Yu, Zhao, Zhou, PPoPP 2021, section 5): when the runtime is idle, its scheduler sorts the
waiting requests by length and finds by dynamic programming which neighbours to pad into one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tenuto.batching.core.scheduler import Dispatch, SchedulerOptions
from tenuto.batching.core.system import INF, System
from tenuto_lab.rivals.base import RivalQueue, RivalScheduler


class SortedBucketsScheduler(RivalScheduler):
    """The scheduler of that paper, with deadlines: of the buckets, the one with the earliest deadline runs first, and
    requests are left out that it would answer late. The sizes are the size classes of the system; requests have one
    size, by which they can be sorted.

    It has no other models in mind: with several models, the one with the earliest deadline is served first.
    """

    name = "sorted-buckets"
    summary = "sorts what waits by size and pads neighbours, as TurboTransformers"
    options_type = SchedulerOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        self._classes = [[self._queue_of[model] for model in classes] for classes in system.classes_of]
        self._model_of = {queue.program: place for place, queues in enumerate(self._classes) for queue in queues}

    def _arrived(self, now: float, queue: RivalQueue) -> None:
        gpulet = self._idle_for(queue)
        if gpulet >= 0:
            self._run(now, self._model_of[queue.program], gpulet)

    def _head_changed(self, now: float, queue: RivalQueue) -> None:
        pass

    def _freed(self, now: float, gpulet: int) -> None:
        heads = [
            (min((queue.deadlines[0] for queue in queues if queue.deadlines), default=INF), place)
            for place, queues in enumerate(self._classes)
        ]
        for head, place in sorted(heads):
            if head < INF and self._run(now, place, gpulet):
                return
        self._set_idle(gpulet)

    def _run(self, now: float, place: int, gpulet: int) -> bool:
        """Send the bucket with the earliest deadline; False if none of its requests can be met."""
        tables = self._tables[gpulet]
        queues = [queue for queue in self._classes[place] if queue.deadlines and queue.program in tables]
        buckets = _cut([len(queue.deadlines) for queue in queues], [tables[queue.program] for queue in queues])
        order = sorted(buckets, key=lambda bucket: min(queue.deadlines[0] for queue in queues[slice(*bucket)]))
        return any(self._send_bucket(now, queues[slice(*bucket)], gpulet) for bucket in order)

    def _send_bucket(self, now: float, queues: Sequence[RivalQueue], gpulet: int) -> bool:
        waiting = sorted((due, queue.ids[n], queue) for queue in queues for n, due in enumerate(queue.deadlines))
        sent = self._tables[gpulet][queues[-1].program]
        size = min(len(waiting), len(sent) - 1)
        skip = 0
        while size and waiting[skip][0] < now + sent[size]:
            skip = bisect_left(waiting, now + sent[size], skip, key=lambda entry: entry[0])
            size = min(len(waiting) - skip, len(sent) - 1)
        if not size:
            return False
        ids = [request for _, request, _ in waiting[skip : skip + size]]
        for _, request, queue in waiting[skip : skip + size]:
            place = queue.ids.index(request)
            queue.remove(place, place + 1)
        self._idle[gpulet], self._busy[gpulet] = False, True
        start = now + self._ctrl_ms + self._data_ms * size
        self.decisions.append(Dispatch(gpulet, queues[-1].program, ids, start, now + sent[size]))
        return True


def _cut(counts: Sequence[int], tables: Sequence[list[float]]) -> list[tuple[int, int]]:
    """Return the buckets as (first, last + 1) of neighbouring classes for which all takes the least time."""
    best, cuts = [0.0], [0]
    for last in range(1, len(counts) + 1):
        options = [(best[first] + _takes(sum(counts[first:last]), tables[last - 1]), first) for first in range(last)]
        ms, first = min(options)
        best.append(ms)
        cuts.append(first)
    buckets, last = [], len(counts)
    while last:
        buckets.append((cuts[last], last))
        last = cuts[last]
    return buckets[::-1]


def _takes(count: int, table: list[float]) -> float:
    """Return how long so many requests take in full batches of one class, and one for the rest."""
    whole, rest = divmod(count, len(table) - 1)
    return whole * table[-1] + table[rest]
