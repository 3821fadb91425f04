"""What of a batch's latency its copies to and from the GPU take, which streaming hides behind the batch before."""

from __future__ import annotations

from tenuto.errors import MissingProfileError
from tenuto.placement.plan import Plan
from tenuto.placement.program import Replica
from tenuto.profiles import ModelProfile


def copy_ms_per_request(model: ModelProfile, batch_size: int, share_pct: float) -> tuple[float | None, float | None]:
    """Return the measured time of one request's copies in and out, in ms; None where the profile has none.

    They are `h2d_ms` and `d2h_ms` of the smallest measured batch that holds `batch_size` (the largest if none does)
    at this share, else on the whole GPU: copy engines are not divided by a share.
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


def hidden_copies_ms(plan: Plan, replica: Replica) -> float:
    """Return how much of a batch's latency streaming hides, in ms of one request: what the model's options say of its
    copies, else the replica; 0 without streaming and where neither says anything."""
    if not plan.streaming:
        return 0.0
    options = plan.model(replica.name).options
    found = 0.0
    for key, planned in (("copy_in_ms", replica.copy_in_ms), ("copy_out_ms", replica.copy_out_ms)):
        value = options.get(key, planned)
        found += float(value) if isinstance(value, int | float) else 0.0  # a wrong one is refused where it is used
    return found


def longest_copies_ms(plan: Plan) -> float:
    """Return how long the copies of the plan's longest copied batch take: what a scheduler has to send it ahead by."""
    return max((hidden_copies_ms(plan, r) * r.batch_size for g in plan.gpulets for r in g.models), default=0.0)
