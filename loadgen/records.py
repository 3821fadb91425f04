"""Records of a run: one row per scheduled request, as numpy columns.

Built from live clients and from simulations alike, so that one verdict and one report serve both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from tenuto.outcome import Outcome

NAN = float("nan")
# Columns without an entry are times in ms.
_DTYPES: dict[str, type[np.generic]] = {
    "request": np.int64,
    "model": np.int32,
    "status": np.int32,
    "outcome": np.int8,
    "batch_size": np.int32,
    "gpulet": np.object_,
    "prompt_tokens": np.int64,
    "output_tokens": np.int64,
    "sizes": np.int64,
}
# Columns that need not be given, and what they then have.
ABSENT = {"first_token_ms": NAN, "prompt_tokens": 0, "output_tokens": 0}
# Columns with several values for each request, and what fills those of requests with fewer.
WIDE = {"sizes": 0, "stage_ms": NAN}


@dataclass
class Records:
    """Columns of equal length. Times are ms from the start of the run on the client's clock; NaN: unknown.

    `scheduled_ms`, `sent_ms` and `answered_ms` are absolute; `batching_ms`, `gpulet_queue_ms` and `execution_ms` are
    durations the server reported. `gpulet` is the gpu-let's id. Of a generation, `first_token_ms` is absolute, and
    `output_tokens` are those that came; without one, tokens are 0. A request of an application is one row. `sizes` has
    the sizes of each request, in the order of the model's `sizes` in the workload, filled by 0. `stage_ms` has how long
    each stage of its application took, from when it was due to its last answer, in the order of the stages, filled by
    NaN.
    """

    request: NDArray[np.int64]
    model: NDArray[np.int32]
    scheduled_ms: NDArray[np.float64]
    sent_ms: NDArray[np.float64]
    answered_ms: NDArray[np.float64]
    status: NDArray[np.int32]
    outcome: NDArray[np.int8]
    batching_ms: NDArray[np.float64]
    gpulet_queue_ms: NDArray[np.float64]
    execution_ms: NDArray[np.float64]
    batch_size: NDArray[np.int32]
    gpulet: NDArray[np.object_]
    first_token_ms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # empty: no model generates
    prompt_tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    output_tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))  # empty: all shapes are fixed
    stage_ms: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))  # empty: no applications

    def __post_init__(self) -> None:
        """Fill columns that are not given: no row is a generation, has sizes, or is of an application."""
        for name in WIDE:
            if len(getattr(self, name)) != len(self.request):
                setattr(self, name, np.zeros((len(self.request), 0), _DTYPES.get(name, np.float64)))
        for name, value in ABSENT.items():
            if len(getattr(self, name)) != len(self.request):
                setattr(self, name, np.full(len(self.request), value, _DTYPES.get(name, np.float64)))

    def __len__(self) -> int:
        """Return the number of requests."""
        return int(self.request.size)

    @classmethod
    def columns(cls) -> dict[str, type[np.generic]]:
        """Return column names and types in order."""
        return {column.name: _DTYPES.get(column.name, np.float64) for column in fields(cls)}

    def where(self, mask: NDArray[np.bool_]) -> Records:
        """Return the rows of a mask."""
        return Records(**{name: getattr(self, name)[mask] for name in self.columns()})

    def without_models(self, places: Sequence[int]) -> Records:
        """Return the rows of all but some models, numbered as if these were not there."""
        if not places:
            return self
        others = self.where(~np.isin(self.model, places))
        others.model = (others.model - np.searchsorted(sorted(places), others.model)).astype(np.int32)
        return others

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """Answered minus scheduled; NaN if no answer came."""
        return self.answered_ms - self.scheduled_ms

    @property
    def lateness_ms(self) -> NDArray[np.float64]:
        """How much later than scheduled the client sent; NaN if it did not send."""
        return self.sent_ms - self.scheduled_ms

    @property
    def ttft_ms(self) -> NDArray[np.float64]:
        """Scheduled time to first token; NaN if none came."""
        return self.first_token_ms - self.scheduled_ms

    @property
    def tpot_ms(self) -> NDArray[np.float64]:
        """Mean time of the tokens after the first; NaN if there are none."""
        further = self.output_tokens - 1.0
        return (self.answered_ms - self.first_token_ms) / np.where(further > 0, further, NAN)

    def within(self, begin_ms: float, end_ms: float) -> Records:
        """Return the requests scheduled in a window."""
        return self.where((self.scheduled_ms >= begin_ms) & (self.scheduled_ms < end_ms))

    @property
    def front_door_ms(self) -> NDArray[np.float64]:
        """Latency less batching, gpu-let queue and execution: the time for network, HTTP, and the client itself."""
        return self.latency_ms - self.batching_ms - self.gpulet_queue_ms - self.execution_ms


def request_id(run: str, number: int) -> str:
    """Return the id of a request in header X-Request-Id and in requests.parquet.

    Args:
        run: the first digits of its schedule's hash.
        number: its place in the schedule.
    """
    return f"{run}-{number}"


def unsent(
    times_ms: NDArray[np.float64],
    model_index: NDArray[np.int32],
    *,
    except_requests: NDArray[np.int64] | None = None,
    sizes: NDArray[np.int64] | None = None,
) -> Records:
    """Return rows of scheduled requests that no client sent: failed, with no times but the scheduled one.

    Args:
        times_ms: the whole schedule.
        model_index: model of each request.
        except_requests: numbers of the requests that have a row already.
        sizes: of each request, where models have sizes.
    """
    request = np.arange(len(times_ms), dtype=np.int64)
    if except_requests is not None:
        request = np.setdiff1d(request, except_requests, assume_unique=True)
    total = len(request)
    times = ("sent_ms", "answered_ms", "batching_ms", "gpulet_queue_ms", "execution_ms")
    unknown = {name: np.full(total, NAN) for name in times}
    scheduled = np.asarray(times_ms, dtype=np.float64)[request]
    return Records(
        request=request,
        model=np.asarray(model_index, dtype=np.int32)[request],
        scheduled_ms=scheduled,
        status=np.zeros(total, np.int32),
        outcome=np.full(total, Outcome.FAILED, np.int8),
        batch_size=np.zeros(total, np.int32),
        gpulet=np.full(total, "", dtype=object),
        sizes=np.zeros((total, 0), np.int64) if sizes is None else sizes[request],
        **unknown,
    )


def merge(parts: Iterable[Records]) -> Records:
    """Join the records of several clients in order of the scheduled time."""
    records = list(parts)
    joined = {
        name: np.concatenate([getattr(part, name) for part in records]) if records else np.empty(0, dtype)
        for name, dtype in Records.columns().items()
        if name not in WIDE
    }
    for name, filled in WIDE.items():
        columns = [getattr(part, name) for part in records]
        width = max((column.shape[1] for column in columns), default=0)
        joined[name] = np.full((len(joined["request"]), width), filled)
        begin = 0
        for column in columns:
            joined[name][begin : (begin := begin + len(column)), : column.shape[1]] = column
    order = np.lexsort((joined["request"], joined["scheduled_ms"]))
    return Records(**{name: column[order] for name, column in joined.items()})
