"""Measure a merged program against its models by themselves, as joint batches of every size that a plan may ask for.

Both ways run in turns, from numpy to numpy, as they are served. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tenuto.profiles.measuring.memory import MemoryMeter
from tenuto.profiles.measuring.timing import Timing, fit_line
from tenuto.profiles.networks.catalogue import LoadedModel
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.merging.merge import example_inputs
from tenuto.profiles.networks.merging.runner import MergedRunner, even_split
from tenuto.profiles.networks.torch_runner import Arrays, RunOptions, TorchRunner
from tenuto.profiles.profile import Fit, ModelProfile, ProfilePoint

__all__ = ["JointTimes", "measure_joint", "measure_memory", "profiles_of"]


@dataclass(frozen=True)
class JointTimes:
    """One split of a joint batch: times of the merged program, and of the models one after the other."""

    share_pct: float
    split: Mapping[str, int]
    together: Timing
    apart: Timing

    @property
    def batch_size(self) -> int:
        """Rows of all members together."""
        return sum(self.split.values())

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "batch_size": self.batch_size, "share_pct": self.share_pct, "split": dict(self.split),
            "together_ms": self.together.median_ms, "apart_ms": self.apart.median_ms,
        }  # fmt: skip


def splits_of(names: Sequence[str], size: int) -> list[dict[str, int]]:
    """Return the splits of a joint batch that are measured: as even as it can be, and each member alone."""
    found: list[dict[str, int]] = []
    for split in (even_split(names, size), *({name: size} for name in names)):
        if split not in found:
            found.append(split)
    return found


def measure_joint(
    runner: MergedRunner,
    models: Mapping[str, LoadedModel],
    batch_sizes: Sequence[int],
    *,
    shares: Sequence[float] = (100.0,),
    repetitions: int = 7,
    clock_s: Callable[[], float] = time.perf_counter,
    report: Callable[[str], None] = lambda _text: None,
) -> list[JointTimes]:
    """Time every split of every joint batch both ways on the CPU.

    All of them run in turns, round after round, so that a slow phase of a shared machine falls on all alike.

    Args:
        runner: the merged program, before it let go of the originals.
        models: the originals.
        batch_sizes: joint batches.
        shares: percentages of the CPU's cores, as threads.
        repetitions: timed runs of each way, after one that is not counted.
        clock_s: monotonic clock.
        report: told what has been done.
    """
    apart = {name: TorchRunner(models[name], "cpu", RunOptions()) for name in runner.names}
    found = []
    threads = torch.get_num_threads()
    try:
        for share in shares:
            torch.set_num_threads(cpu_threads(share))
            splits = [split for size in batch_sizes for split in splits_of(runner.names, size)]
            samples: list[tuple[list[float], list[float]]] = [([], []) for _ in splits]
            for repetition in range(repetitions + 1):
                for split, (together_ms, apart_ms) in zip(splits, samples, strict=True):
                    both = _both_ways_ms(runner, apart, split, clock_s)
                    if repetition:  # the first is the warm-up
                        together_ms.append(both[0])
                        apart_ms.append(both[1])
                report(f"{len(splits)} splits at {share:g} %: round {repetition} of {repetitions}")
            found += [
                JointTimes(share, split, Timing.of(together_ms), Timing.of(apart_ms))
                for split, (together_ms, apart_ms) in zip(splits, samples, strict=True)
            ]
    finally:
        torch.set_num_threads(threads)
    return found


def _both_ways_ms(
    runner: MergedRunner, apart: Mapping[str, TorchRunner], split: Mapping[str, int], clock_s: Callable[[], float]
) -> tuple[float, float]:
    inputs = _inputs(runner, split)
    begun = clock_s()
    runner.run(inputs, split)
    middle = clock_s()
    for name, rows in split.items():
        apart[name].run(inputs[name], rows)
    return (middle - begun) * 1000.0, (clock_s() - middle) * 1000.0


def _inputs(runner: MergedRunner, split: Mapping[str, int]) -> dict[str, Arrays]:
    found = {}
    for name, rows in split.items():
        signature = runner.signatures[name]
        tensors = example_inputs(signature, rows)
        found[name] = {spec.name: tensor.numpy() for spec, tensor in zip(signature.inputs, tensors, strict=True)}
    return found


def measure_memory(runner: MergedRunner, batch_sizes: Sequence[int], meter: MemoryMeter) -> dict[int, float]:
    """Return the peak memory of the merged program by joint batch, in MiB; empty where it cannot be told.

    The runner must have let go of the originals, and the caller too; `meter` was made before they were built. On a CPU
    memory that other work of this process has freed hides growth, so at least the weights are counted.
    """
    found = {}
    for size in batch_sizes:
        split = even_split(runner.names, size)
        meter.reset()
        runner.run(_inputs(runner, split), split)
        peak_mib = meter.peak_mib()
        if peak_mib is not None:
            found[size] = round(max(peak_mib, runner.report.memory_after_mib), 3)
    return found


def profiles_of(
    runner: MergedRunner,
    times: Sequence[JointTimes],
    memory_mib: Mapping[int, float],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, ModelProfile]:
    """Return the profile rows: of the group by the worst split of each joint batch, and of its members alone."""
    rows = {"+".join(sorted(runner.names)): _profile(_worst(times), memory_mib, runner.report.memory_after_mib)}
    for name in runner.names:
        alone = [(one.share_pct, one.batch_size, one.apart) for one in times if set(one.split) == {name}]
        profile = _profile(alone, {}, None)
        rows[name] = profile.model_copy(update={"network": sources[name], "options": dict(options)})
    return rows


def _worst(times: Sequence[JointTimes]) -> list[tuple[float, int, Timing]]:
    worst: dict[tuple[float, int], Timing] = {}
    for one in times:
        key = (one.share_pct, one.batch_size)
        if key not in worst or one.together.median_ms > worst[key].median_ms:
            worst[key] = one.together
    return [(share, size, timing) for (share, size), timing in worst.items()]


def _profile(
    timings: Sequence[tuple[float, int, Timing]], memory_mib: Mapping[int, float], weights_mib: float | None
) -> ModelProfile:
    points = tuple(
        ProfilePoint(
            batch_size=size,
            share_pct=share,
            latency_ms=round(timing.median_ms, 4),
            latency_spread_ms=round(timing.spread_ms, 4),
            memory_mib=memory_mib.get(size),
        )
        for share, size, timing in sorted(timings, key=lambda item: (-item[0], item[1]))
    )
    line = fit_line([(point.batch_size, point.latency_ms) for point in points if point.share_pct == 100.0])
    fit = None
    if line is not None:
        alpha, beta, r_squared, error = line
        fit = Fit(
            alpha_ms=round(alpha, 5), beta_ms=round(beta, 5), max_error_pct=round(error, 2),
            r_squared=None if r_squared is None else round(r_squared, 5),
        )  # fmt: skip
    return ModelProfile(points=points, fit=fit, weights_mib=None if weights_mib is None else round(weights_mib, 2))
