"""What of a batch's latency its copies to and from the GPU take, which streaming hides behind the batch before."""

from __future__ import annotations

from tenuto.errors import MissingProfileError
from tenuto.profiles import ModelProfile

__all__ = ["copy_ms_per_request"]


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
