"""How large a batch may be when n GPUs take turns on one model: the analytic bounds of Symphony, section 3.

Without coordination a request may just miss a batch and wait for a whole one: 2*l(b) <= SLO. When the n GPUs start
their batches evenly staggered, one becomes free every l(b)/n, so it waits only that long: (1 + 1/n)*l(b) <= SLO.
"""

from __future__ import annotations

from tenuto.profiles import LatencyTable, LinearLatency

__all__ = ["staggered_batch", "throughput_rps", "uncoordinated_batch"]


def uncoordinated_batch(latency: LinearLatency | LatencyTable, slo_ms: float) -> int:
    """Return the largest b with 2*l(b) <= slo_ms, or 0."""
    return latency.largest_batch(slo_ms / 2)


def staggered_batch(latency: LinearLatency | LatencyTable, slo_ms: float, gpus: int) -> int:
    """Return the largest b with (1 + 1/gpus)*l(b) <= slo_ms, or 0; for one GPU the same as without coordination."""
    return latency.largest_batch(slo_ms / (1 + 1 / gpus))


def throughput_rps(latency: LinearLatency | LatencyTable, batch_size: int, gpus: int) -> float:
    """Return the requests per second of `gpus` GPUs that run full batches without a gap; 0 for a batch of 0."""
    return 1000.0 * gpus * batch_size / latency.at(batch_size) if batch_size else 0.0
