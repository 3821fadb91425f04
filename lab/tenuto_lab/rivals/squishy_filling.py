"""Squishy bin packing on a fixed number of GPUs: all rates are scaled alike until the GPUs are full."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto_lab.squishy import Bin, Demand, full_batch, pack


def fill(
    demands: Sequence[Demand], gpus: int, *, largest_scale: float = float("inf"), slack_ms: float = 0.0
) -> tuple[float, list[Bin]]:
    """Scale all rates by the largest common factor at which `gpus` GPUs carry them.

    Returns:
        The factor, at most `largest_scale`, and the packing on at most `gpus` GPUs. When the models do not fit even at
        tiny rates, the factor is 0 and the emptiest GPUs hold more than their duty cycles allow, so that some requests
        will be late.
    """
    if not demands or gpus < 1:
        return 0.0, []

    def at(scale: float) -> list[Bin]:
        return pack([Demand(d.model, d.rate_rps * scale, d.slo_ms, d.latency_ms) for d in demands], slack_ms=slack_ms)

    if largest_scale != float("inf"):
        bins = at(largest_scale)
        if len(bins) <= gpus:
            return largest_scale, bins
    # The throughput of a model alone on a GPU is an upper bound for what the GPU can carry.
    need = sum(d.rate_rps * d.latency_ms[full_batch(d, slack_ms)] / (1000.0 * full_batch(d, slack_ms)) for d in demands)
    high = min(largest_scale, 1.001 * gpus / need)
    low, best = 0.0, None
    for step in range(24):
        scale = (low + high) / 2 if step else high
        bins = at(scale)
        if len(bins) <= gpus:
            low, best = scale, bins
            if not step:
                break
        else:
            high = scale
        if best is not None and high - low < 1e-4 * high:
            break
    if best is not None:
        return low, best
    bins = sorted(at(max(high, 1e-6 * gpus / need)), key=lambda node: -node.occupancy)
    kept, over = bins[:gpus], bins[gpus:]
    for node in over:
        target = min(kept, key=lambda other: other.occupancy)
        target.parts += node.parts
        target.demands += node.demands
        target.busy_ms += node.busy_ms
        target.duty_ms = min(target.duty_ms, node.duty_ms)
    return 0.0, kept
