"""How much of a batch's latency its copies to and from the GPU take. Streaming hides them behind the batch before."""

from __future__ import annotations

from tenuto.errors import MissingProfileError
from tenuto.placement.plan import Plan
from tenuto.placement.program import Program, Replica
from tenuto.profiles import ModelProfile


def copy_ms_per_request(model: ModelProfile, batch_size: int, share_pct: float) -> tuple[float | None, float | None]:
    """Return how long the copies of one request into the GPU and out of it take, in ms; None if not measured.

    They come from `h2d_ms` and `d2h_ms` of the smallest measured batch of at least `batch_size`, or of the largest if
    none is as large. If this share was not measured, the whole GPU counts, as shares do not divide copy engines.
    """
    for share in (share_pct, 100.0):
        sizes = model.batch_sizes(share)
        size = min((s for s in sizes if s >= batch_size), default=max(sizes, default=0))
        try:
            metrics = model.point(size, share).metrics
        except MissingProfileError:
            continue
        if "h2d_ms" in metrics:
            back_ms = metrics.get("d2h_ms")
            return round(metrics["h2d_ms"] / size, 6), None if back_ms is None else round(back_ms / size, 6)
    return None, None


def hidden_copies_ms(plan: Plan, program: Program) -> float:
    """Return how much of a batch's latency streaming hides, in ms per request; joint batches do not stream."""
    return 0.0 if program.is_joint else _copies_ms(plan, program.members[0])


def _copies_ms(plan: Plan, replica: Replica) -> float:
    """Return how long the copies of a request take where the plan streams.

    The model's options count first, then the replica's own copy times. Without streaming, or without either, it is 0.
    """
    if not plan.streaming:
        return 0.0
    options = plan.model(replica.name).options
    total_ms = 0.0
    for key, planned in (("copy_in_ms", replica.copy_in_ms), ("copy_out_ms", replica.copy_out_ms)):
        value = options.get(key, planned)
        total_ms += float(value) if isinstance(value, int | float) else 0.0  # a wrong value is refused where it is used
    return total_ms


def longest_copies_ms(plan: Plan) -> float:
    """Return the longest time that the copies of any batch of the plan take. Schedulers send batches ahead by it."""
    return max((_copies_ms(plan, r) * r.batch_size for g in plan.gpulets for r in g.models), default=0.0)
