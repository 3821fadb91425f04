"""The autoscale advice over the time of a simulated run: what Symphony would advise, window by window."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.virtual.result import SimulationResult
from tenuto.outcome import Outcome
from tenuto_lab.autoscale import Advice, AutoscaleAdvisor, AutoscaleOptions


def advice_over_time(result: SimulationResult, options: AutoscaleOptions) -> list[Advice]:
    """Return the advice of every full window of a run, warm-up included, without following it.

    A request counts in the window of its answer; without an answer, in that of its deadline. A GPU with several
    gpu-lets is busy for the sum of their times, at most the whole window.
    """
    names = {gpu: place for place, gpu in enumerate(dict.fromkeys(gpulet.gpu for gpulet in result.system.gpulets))}
    advisor = AutoscaleAdvisor(max(1, len(names)), options)
    windows = math.floor(result.duration_s / options.window_s + 1e-9)
    if not windows:
        return []
    slo = np.array([model.slo_ms for model in result.system.models], dtype=np.float64)
    ended_ms = np.where(np.isnan(result.answered_ms), result.arrival_ms + slo[result.model], result.answered_ms)
    arrived = ~np.isnan(ended_ms)  # a stage of an application that was never due counts as no request
    window = np.floor(ended_ms[arrived] / (1000.0 * options.window_s)).astype(np.int64)
    is_good = result.outcome[arrived] == Outcome.OK
    good = np.bincount(window[is_good], minlength=windows)
    bad = np.bincount(window[~is_good], minlength=windows)
    busy_s = _busy_s(result, names, windows, options.window_s)
    found: list[Advice] = []
    for index in range(windows):
        middle_s = (index + 0.5) * options.window_s
        found += advisor.add(middle_s, good=int(good[index]), bad=int(bad[index]), busy_gpu_s=float(busy_s[index]))
    return found + advisor.add(windows * options.window_s)


def _busy_s(result: SimulationResult, names: dict[str, int], windows: int, window_s: float) -> NDArray[np.float64]:
    """Return the GPU-seconds spent on batches in each window."""
    log = result.batches
    place = np.array([names[gpulet.gpu] for gpulet in result.system.gpulets], dtype=np.int64)
    gpu = place[np.array(log.gpulet, dtype=np.int64)]
    start = np.array(log.start_ms, dtype=np.float64) / 1000.0
    finish = np.array(log.finish_ms, dtype=np.float64) / 1000.0
    busy = np.zeros((windows, max(1, len(names))))
    first = np.floor(start / window_s).astype(np.int64)
    longest = int(np.max(np.floor(finish / window_s).astype(np.int64) - first, initial=0))
    for step in range(longest + 1):
        window = first + step
        low, high = window * window_s, (window + 1) * window_s
        part = np.maximum(0.0, np.minimum(finish, high) - np.maximum(start, low))
        inside = window < windows
        np.add.at(busy, (window[inside], gpu[inside]), part[inside])
    total: NDArray[np.float64] = np.minimum(busy, window_s).sum(axis=1)
    return total
