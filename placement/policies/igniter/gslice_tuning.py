"""GSLICE's tuning loops: batch sizes and shares of a GPU's residents, each from what it is observed to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto.placement.interference.igniter import Load, inference_time_ms
from tenuto.placement.policies.igniter.shares import Demand


@dataclass(frozen=True)
class Rules:
    """What the loops may do; see the options of the policy. Shares are in units of the GPU type."""

    threshold: float  # part of a target within which a value is left alone
    batch_rounds: int
    share_rounds: int
    start_units: int
    max_batch: int
    served: bool  # an observed throughput never exceeds the arrivals
    overcommit: bool


@dataclass(frozen=True)
class Setting:
    """The batch size and the share, in units, of one resident."""

    batch_size: int
    units: int


@dataclass(frozen=True)
class Observed:
    """Mean latency of a batch in ms, and the highest throughput in requests/s, beside the residents as they are."""

    latency_ms: float
    capacity_rps: float


def observe(demands: Sequence[Demand], settings: Sequence[Setting]) -> list[Observed]:
    """Return what iGniter's analytic model has every resident do (eq. 1 to 11): the stand-in for a measurement.

    Throughput is b / (t_gpu + t_feedback), as loading overlaps with computing (eq. 2).
    """
    loads = [
        Load.of(demand.model, setting.batch_size, setting.units * demand.hardware.share_unit_pct)
        for demand, setting in zip(demands, settings, strict=True)
    ]
    found = []
    for demand, own in zip(demands, loads, strict=True):
        time_ms = inference_time_ms(demand.model, own, loads, demand.hardware)
        load_ms = own.batch_size * demand.model.load_bytes / demand.hardware.pcie_bytes_per_ms
        found.append(Observed(time_ms, 1000.0 * own.batch_size / (time_ms - load_ms)))
    return found


def tune(demands: Sequence[Demand], rules: Rules, largest_batch: Callable[[int, Sequence[int]], int]) -> list[Setting]:
    """Return the settings that the loops end with.

    All residents start with batches of one and the same share. Up to `share_rounds` times the batch sizes are tuned and
    then, once, the shares; at the end the batch sizes again. Residents are observed together and changed at the same
    time, each by itself.

    Args:
        largest_batch: the largest batch of the i-th resident that memory allows beside these batch sizes.
    """
    settings = [Setting(1, rules.start_units) for _ in demands]
    if not rules.overcommit:
        settings = _within_the_gpu(demands, settings)
    for _ in range(rules.share_rounds):
        settings = _tune_batches(demands, settings, rules, largest_batch)
        seen = observe(demands, settings)
        changed = [
            Setting(setting.batch_size, _next_units(demand, setting, one, rules))
            for demand, setting, one in zip(demands, settings, seen, strict=True)
        ]
        if not rules.overcommit:
            changed = _within_the_gpu(demands, changed)
        if changed == settings:
            return settings
        settings = changed
    return _tune_batches(demands, settings, rules, largest_batch)


def _tune_batches(
    demands: Sequence[Demand],
    settings: Sequence[Setting],
    rules: Rules,
    largest_batch: Callable[[int, Sequence[int]], int],
) -> list[Setting]:
    now = list(settings)
    for _ in range(rules.batch_rounds):
        sizes = [setting.batch_size for setting in now]
        for index, (demand, one) in enumerate(zip(demands, observe(demands, now), strict=True)):
            wanted = _next_batch(demand, sizes[index], one, rules)
            sizes[index] = min(wanted, max(1, largest_batch(index, sizes)))
        after = [Setting(size, setting.units) for size, setting in zip(sizes, now, strict=True)]
        if after == now:
            break
        now = after
    return now


def _next_batch(demand: Demand, size: int, seen: Observed, rules: Rules) -> int:
    """Grow or shrink a batch by the part by which the latency misses its target, half the SLO."""
    slack_ms = demand.budget_ms - seen.latency_ms
    if 0 < slack_ms < rules.threshold * demand.budget_ms:
        return size
    return min(rules.max_batch, max(1, math.ceil(size * (1 + slack_ms / seen.latency_ms) - 1e-9)))


def _next_units(demand: Demand, setting: Setting, seen: Observed, rules: Rules) -> int:
    """Grow a share that misses latency or throughput, shrink one that has more than enough of both."""
    throughput = min(seen.capacity_rps, demand.rate_rps) if rules.served else seen.capacity_rps
    latency_slack = demand.budget_ms - seen.latency_ms
    rate_slack = throughput - demand.rate_rps
    if 0 < latency_slack < rules.threshold * demand.budget_ms and 0 <= rate_slack < rules.threshold * demand.rate_rps:
        return setting.units
    factor = max(abs(latency_slack) / seen.latency_ms, abs(rate_slack) / throughput)
    if latency_slack < 0 or rate_slack < 0:
        changed = setting.units * (1 + factor)
    elif latency_slack > 0 and rate_slack > 0:
        changed = setting.units * (1 - factor)
    else:
        return setting.units
    return min(demand.most_units, max(1, math.ceil(changed - 1e-9)))


def _within_the_gpu(demands: Sequence[Demand], settings: Sequence[Setting]) -> list[Setting]:
    """Cut the largest shares, one unit at a time, until all fit into the GPU."""
    units = [setting.units for setting in settings]
    while demands and sum(units) > demands[0].most_units:
        units[units.index(max(units))] -= 1
    return [Setting(setting.batch_size, max(1, own)) for setting, own in zip(settings, units, strict=True)]
