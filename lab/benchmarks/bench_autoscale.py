"""Symphony figure 15 in small: 24 models with changing rates on up to 512 emulated GPUs, the scaling advice followed.

    python lab/benchmarks/bench_autoscale.py [--quick] [--svg FILE]

The deferred scheduler begins with few GPUs; at the end of each window the advice of section 3.5 is carried out, the
last GPUs of the order being released first. Prints GPUs in use, the GPUs the rates need, the share of bad requests and
the advice over time, and draws them.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scenes import arguments, print_machine, uniform_system, zoo
from svg_panels import Panel, Series, draw

from tenuto.batching.core.deferred import DeferredOptions, DeferredScheduler
from tenuto.batching.core.scheduler import Decision, Dispatch, Drop
from tenuto.batching.virtual.simulator import simulate
from tenuto.profiles import LinearLatency
from tenuto_lab.autoscale import Advice, AutoscaleAdvisor, AutoscaleOptions

MODELS, MOST_GPUS, FIRST_GPUS = 24, 512, 192


class Watched(DeferredScheduler):
    """Counts its own decisions, as the dispatcher does live: what is sent ends in time, what is dropped is bad."""

    good = bad = 0
    busy_ms = now_ms = 0.0

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        self.now_ms = now_ms
        super().add_request(now_ms, model, request_id, deadline_ms)

    def take_decisions(self) -> list[Decision]:
        decisions = super().take_decisions()
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.good += len(decision.request_ids)
                self.busy_ms += decision.finish_ms - decision.start_ms
            elif isinstance(decision, Drop):
                self.bad += len(decision.request_ids)
        return decisions


class Follower:
    """Carries the advice out: gpu-lets 0 to N-1 are in use."""

    def __init__(self, core: Watched, options: AutoscaleOptions) -> None:
        self.core = core
        self.advisor, self.gpus = AutoscaleAdvisor(FIRST_GPUS, options), FIRST_GPUS
        self.history: list[Advice] = []
        for gpulet in range(FIRST_GPUS, MOST_GPUS):
            core.gpulet_lost(0.0, gpulet)

    def __call__(self, _lost_by_model: list[int]) -> bool:
        core, now_ms = self.core, self.core.now_ms
        found = self.advisor.add(now_ms / 1000.0, good=core.good, bad=core.bad, busy_gpu_s=core.busy_ms / 1000.0)
        core.good = core.bad = 0
        core.busy_ms = 0.0
        self.history += found
        if found and found[-1].delta_gpus:
            before, after = self.gpus, min(MOST_GPUS, self.gpus + found[-1].delta_gpus)
            for gpulet in range(before, after):
                core.gpulet_back(now_ms, gpulet)
            for gpulet in range(after, before):
                core.gpulet_lost(now_ms, gpulet)  # the batch it runs is still finished by the emulated GPU
            self.gpus = after
            self.advisor.set_gpus(now_ms / 1000.0, after)
        return False


def needs(duration_s: int, seed: int) -> NDArray[np.float64]:
    """Return GPUs needed by second and model: slow waves of different phase, a sudden doubling of a third, a fall of
    all."""
    rng = np.random.default_rng(seed)
    second = np.arange(duration_s)[:, None] / duration_s
    size = rng.uniform(0.5, 1.5, MODELS) * 230.0 / MODELS
    wave = 1.0 + 0.6 * np.sin(2 * math.pi * (second * rng.uniform(0.8, 1.6, MODELS) + rng.uniform(0, 1, MODELS)))
    level = np.ones((duration_s, MODELS))
    level[int(0.45 * duration_s) : int(0.7 * duration_s), : MODELS // 3] = 2.0
    level[int(0.8 * duration_s) :] = 0.4
    return size * wave * level


def arrivals(rates_rps: NDArray[np.float64], seed: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return Poisson arrivals whose rates change every second."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rates_rps)
    cells = np.repeat(np.arange(counts.size), counts.ravel())
    times = (cells // MODELS + rng.random(len(cells))) * 1000.0
    order = np.argsort(times, kind="stable")
    return times[order], (cells % MODELS)[order].astype(np.int32)


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--svg", metavar="FILE", default="autoscale.svg", help="where to draw the picture")

    chosen = arguments(__doc__ or "", more)
    print_machine()
    duration_s, window_s = (60, 2.0) if chosen.quick else (120, 2.0)
    models = zoo("1080ti")[:MODELS]
    system = uniform_system(models, MOST_GPUS)
    carries = []
    for _, alpha, beta, slo, _ in models:
        line = LinearLatency(alpha_ms=alpha, beta_ms=beta)
        size = line.largest_batch(slo / (1 + 1 / 64))
        carries.append(1000.0 * size / line.at(size))
    need = needs(duration_s, 0)
    times, which = arrivals(need * np.array(carries), 1)
    core = Watched(system, DeferredOptions(save_above=0.0))  # GPUs are to be idle as far as the load allows
    follower = Follower(core, AutoscaleOptions(window_s=window_s))
    result = simulate(core, times, which, duration_s=float(duration_s), warmup_s=0.0, stop=follower)
    history = follower.history
    print(
        f"\n{len(times):,} requests of {MODELS} models in {duration_s} s on at most {MOST_GPUS} GPUs; "
        f"simulated in {result.wall_s:.0f} s; windows of {window_s:g} s"
    )
    print(f"{'until s':>8} {'GPUs':>6} {'needed':>7} {'offered r/s':>12} {'bad %':>7} {'idle %':>7} {'advice':>7}")
    needed = need.sum(axis=1)
    for advice in history:
        span = slice(int(advice.start_s), int(advice.end_s))
        print(
            f"{advice.end_s:8.0f} {advice.gpus:6d} {needed[span].mean():7.0f} {advice.requests / window_s:12,.0f} "
            f"{100 * advice.bad_rate:7.2f} {100 * advice.idle_fraction:7.1f} {advice.delta_gpus:+7d}"
        )
    used = np.array([advice.gpus for advice in history], dtype=np.float64)
    total_bad = sum(a.bad_rate * a.requests for a in history) / sum(a.requests for a in history)
    print(
        f"\nGPU-hours used {used.sum() * window_s / 3600:.1f}; needed at full staggered batches "
        f"{needed.sum() / 3600:.1f}; peak of the need held all the time {needed.max() * duration_s / 3600:.1f}; "
        f"bad {100 * total_bad:.2f} % over all, "
        f"{100 * np.median([a.bad_rate for a in history]):.2f} % in the median window"
    )
    ends = [advice.end_s for advice in history]
    seconds = [float(s) for s in range(duration_s)]
    panels = [
        Panel(
            "GPUs",
            [
                Series("in use", ends, used.tolist(), "#1f6f8b", steps=True),
                Series("needed at full batches", seconds, needed.tolist(), "#c8553d"),
            ],
        ),
        Panel(
            "Bad requests, %",
            [Series("late or dropped", ends, [100 * a.bad_rate for a in history], "#8a1c4a", steps=True)],
        ),
        Panel(
            "Advice, GPUs",
            [Series("to add (+) or release (-)", ends, [float(a.delta_gpus) for a in history], "#3a7d44", bars=True)],
        ),
    ]
    title = f"{MODELS} models, changing rates, up to {MOST_GPUS} emulated GPUs: advice followed every {window_s:g} s"
    Path(chosen.svg).write_text(draw(title, panels, "time, s"), encoding="utf-8")
    print(f"picture: {chosen.svg}")


if __name__ == "__main__":
    main()
