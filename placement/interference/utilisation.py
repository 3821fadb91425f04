"""Utilisations of a GPU by a batch running alone, the input of interference models fitted on measurements."""

from __future__ import annotations

from tenuto.errors import MissingProfileError
from tenuto.placement.interference.base import Resident
from tenuto.profiles import ModelProfile

__all__ = ["utilisation"]


def utilisation(resident: Resident, metric: str) -> float:
    """Return a metric in percent as a fraction, as measured alone at the resident's batch size and share.

    Between measured batch sizes, and between measured shares, the line through the two nearest is used (gpulet's
    repository does so for batch sizes).

    Raises:
        MissingProfileError: the batch size or the share is outside of what was measured, or the metric is not there.
    """
    profile, share = resident.profile, resident.share_pct
    shares = profile.shares()
    below = max((known for known in shares if known <= share), default=None)
    above = min((known for known in shares if known >= share), default=None)
    if below is None or above is None:
        raise MissingProfileError(
            f"metric '{metric}' at share {share:g} %: outside of the measured shares {shares}. Profile with --shares."
        )
    low = _between_batches(profile, metric, resident.batch_size, below)
    if above == below:
        return low / 100.0
    high = _between_batches(profile, metric, resident.batch_size, above)
    return (low + (high - low) * (share - below) / (above - below)) / 100.0


def _between_batches(profile: ModelProfile, metric: str, batch_size: int, share_pct: float) -> float:
    sizes = profile.batch_sizes(share_pct)
    below = max((size for size in sizes if size <= batch_size), default=None)
    above = min((size for size in sizes if size >= batch_size), default=None)
    if below is None or above is None:
        raise MissingProfileError(
            f"metric '{metric}' at batch size {batch_size}, share {share_pct:g} %: outside of the measured batch sizes "
            f"{sizes}. Profile it with --batch-sizes."
        )
    low = profile.metric(metric, below, share_pct)
    if above == below:
        return low
    high = profile.metric(metric, above, share_pct)
    return low + (high - low) * (batch_size - below) / (above - below)
