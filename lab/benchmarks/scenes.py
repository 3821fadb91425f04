"""Shared by the batching benchmarks: published set-ups, goodput by name of scheduler, and the output of results."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tenuto import version
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.criterion import Criterion, Goal, Trial
from tenuto.batching.virtual.highest_rate import SearchLimits, find_highest_rate
from tenuto.profiles.shipped import load_shipped

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `tests`, where this is not the folder it is started in

from tests.instruments.systems import everywhere_linear, try_arrivals

Model = tuple[str, float, float, float, float | None]  # name, alpha_ms, beta_ms, slo_ms, rate_rps

RESNET50: Model = ("ResNet50", 1.053, 5.072, 25.0, None)
INCEPTION: Model = ("InceptionResNetV2", 5.090, 18.368, 70.0, None)


def zoo(gpu_type: str, batching: str = "all") -> list[Model]:
    """Return Symphony's models on `1080ti` or `a100`; `strong` are those with beta/alpha above 2, `weak` the others."""
    models = []
    for name, profile in load_shipped(f"symphony-{gpu_type}").models.items():
        line = profile.line
        assert line is not None
        if batching == "all" or (batching == "strong") == (line.beta_ms / line.alpha_ms > 2):
            models.append((name, line.alpha_ms, line.beta_ms, profile.coefficients["slo_ms"], None))
    return models


def poisson(rates_rps: Sequence[float], duration_s: float, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return merged Poisson arrivals of all models."""
    return gamma(rates_rps, duration_s, seed, 1.0)


def gamma(
    rates_rps: Sequence[float], duration_s: float, seed: int, shape: float
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return merged arrivals with gamma-distributed gaps; shape 1 is Poisson, smaller is burstier."""
    rng = np.random.default_rng(seed)
    if shape == 1.0:
        total = float(sum(rates_rps))
        count = int(total * duration_s + 6 * (total * duration_s) ** 0.5 + 10)
        times = np.cumsum(rng.exponential(1000.0 / total, count))
        times = times[times < duration_s * 1000.0]
        weights = np.asarray(rates_rps, dtype=np.float64) / total
        return times, rng.choice(len(rates_rps), len(times), p=weights).astype(np.int32)
    columns, labels = [], []
    for model, rate in enumerate(rates_rps):
        count = int(rate * duration_s + 8 * (rate * duration_s / shape) ** 0.5 + 50)
        times = np.cumsum(rng.gamma(shape, 1000.0 / rate / shape, count))
        times = times[times < duration_s * 1000.0]
        columns.append(times)
        labels.append(np.full(len(times), model, dtype=np.int32))
    merged, which = np.concatenate(columns), np.concatenate(labels)
    order = np.argsort(merged, kind="stable")
    return merged[order], which[order]


def goodput_rps(
    system: System,
    scheduler: str,
    guess_rps: float,
    *,
    duration_s: float,
    seed: int,
    criterion: Criterion = "each",
    options: dict[str, str] | None = None,
    popularity: Sequence[float] | None = None,
    shape: float = 1.0,
    tolerance: float = 0.003,
    growth: float = 2.0,
) -> float:
    """Return the highest offered rate (all models together, r/s) with at most 1 % late or dropped."""
    parts = np.asarray(popularity if popularity is not None else [1.0] * len(system.models), dtype=np.float64)
    parts = parts / parts.sum()

    def attempt(rate_rps: float) -> Trial:
        arrivals = gamma(parts * rate_rps, duration_s, seed, shape)
        fresh = make_scheduler(scheduler, system, options)
        return try_arrivals(fresh, *arrivals, Goal(criterion), duration_s=duration_s)

    found = find_highest_rate(attempt, SearchLimits(tolerance, start_scale=guess_rps, growth=growth))
    if found.is_interrupted:
        raise KeyboardInterrupt  # what was found until then is no figure
    return found.rate_scale


def uniform_system(models: Sequence[Model], gpus: int, network: NetworkDelay | None = None) -> System:
    """Return the plain setting: every GPU holds every model."""
    return everywhere_linear(models, gpus, network or NetworkDelay())


def arguments(description: str, more: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Parse --quick and --seeds, and whatever `more` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="shorter runs, fewer points and seeds")
    parser.add_argument("--seeds", type=int, default=None, help="number of arrival seeds")
    if more is not None:
        more(parser)
    return parser.parse_args()


def print_machine() -> None:
    """Print hardware, versions and date: figures without them are worth nothing."""
    model = platform.processor() or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    print(
        f"# {time.strftime('%Y-%m-%d')}  {model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, numpy {np.__version__}, tenuto {version()}"
    )
    print(f"# command: python {' '.join(sys.argv)}; GPUs are emulated in virtual time")


def spread(values: Sequence[float]) -> str:
    """Return mean and range."""
    if len(values) == 1:
        return f"{values[0]:,.0f}"
    return f"{statistics.mean(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"
