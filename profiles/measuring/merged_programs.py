"""Measure a merged program against its models by themselves, as joint batches of every size that a plan may ask for.

Both ways run in turns, from numpy to numpy, as they are served. Imports torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tenuto.profiles.measuring.measure import Measurement
from tenuto.profiles.measuring.memory_meter import MemoryMeter
from tenuto.profiles.measuring.profile_worker import describe_machine
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.measuring.timing import Timing, fit_points
from tenuto.profiles.networks.catalogue import LoadedModel
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.inputs import Blocks, as_blocks, random_inputs
from tenuto.profiles.networks.merging.joint_network import MergedNetwork, even_split
from tenuto.profiles.networks.merging.merge import MergedModels
from tenuto.profiles.networks.model_options import PLAIN
from tenuto.profiles.networks.programs import lone_program
from tenuto.profiles.networks.runner import ProgramRunner
from tenuto.profiles.profile import ModelProfile, ProfilePoint


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
            "batch_size": self.batch_size,
            "share_pct": self.share_pct,
            "split": dict(self.split),
            "together_ms": self.together.median_ms,
            "apart_ms": self.apart.median_ms,
        }


def measure_into(
    writer: ProfileWriter,
    merged: list[MergedModels],
    models: dict[str, LoadedModel],
    *,
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    batch_sizes: Sequence[int],
    shares: Sequence[float],
    repetitions: int,
    meter: MemoryMeter,
    say: Callable[[str], None],
) -> list[list[JointTimes]]:
    """Measure every cluster, write its rows and those of its models, and return the times of each by split.

    `merged` and `models` are emptied, because the memory of a merged program can be measured only when the originals
    are gone, and only if there is one program.
    """
    machine = describe_machine("cpu")
    signatures = {name: loaded.signature for name, loaded in models.items()}
    networks = [MergedNetwork([found], {name: signatures[name] for name in found.names}) for found in merged]
    measured = []
    for network in networks:
        splits = [split for size in batch_sizes for split in splits_of(tuple(network.signatures), size)]
        measured.append(measure_joint(network, models, splits, shares=shares, repetitions=repetitions, report=say))
    merged.clear()
    models.clear()
    gc.collect()
    for network, times in zip(networks, measured, strict=True):
        memory_mib: dict[int, float] = {}
        if len(networks) == 1:
            say("the merged program's memory")
            network.settle(torch.device("cpu"))
            gc.collect()
            memory_mib = measure_memory(network, batch_sizes, meter)
        writer.machine(machine)
        for name, profile in profiles_of(network, times, memory_mib, sources, options).items():
            writer.finish(Measurement(name, profile, machine))
    return measured


def splits_of(names: Sequence[str], size: int) -> list[dict[str, int]]:
    """Return the splits of a joint batch that are measured: the most even one, and all of each member alone."""
    splits: list[dict[str, int]] = []
    for split in (even_split(names, size), *({name: size} for name in names)):
        if split not in splits:
            splits.append(split)
    return splits


def measure_joint(
    merged: MergedNetwork,
    models: Mapping[str, LoadedModel],
    splits: Sequence[Mapping[str, int]],
    *,
    shares: Sequence[float] = (100.0,),  # default
    repetitions: int,
    report: Callable[[str], None] = lambda _text: None,
) -> list[JointTimes]:
    """Time splits of joint batches both ways on the CPU.

    All of them run in turns, round after round, so that a slow phase of a shared machine falls on all alike.

    Args:
        merged: the merged program, while it still has the originals.
        models: the originals.
        splits: rows of each model.
        shares: percentages of the CPU's cores, as threads.
        repetitions: timed runs of each way, after one that is not counted.
        report: is called with lines of progress.
    """
    together = ProgramRunner(merged)
    apart = {name: lone_program(name, models[name], PLAIN) for name in merged.signatures}
    points = []
    threads = torch.get_num_threads()
    try:
        for share in shares:
            torch.set_num_threads(cpu_threads(share))
            samples: list[tuple[list[float], list[float]]] = [([], []) for _ in splits]
            for repetition in range(repetitions + 1):
                for split, (together_ms, apart_ms) in zip(splits, samples, strict=True):
                    both = _both_ways_ms(together, apart, split)
                    if repetition:  # the first run is the warm-up
                        together_ms.append(both[0])
                        apart_ms.append(both[1])
                report(f"{len(splits)} splits at {share:g} %: round {repetition} of {repetitions}")
            points += [
                JointTimes(share, split, Timing.of(together_ms), Timing.of(apart_ms))
                for split, (together_ms, apart_ms) in zip(splits, samples, strict=True)
            ]
    finally:
        torch.set_num_threads(threads)
    return points


def _both_ways_ms(
    together: ProgramRunner, apart: Mapping[str, ProgramRunner], split: Mapping[str, int]
) -> tuple[float, float]:
    inputs = _inputs(together, split)
    begun = time.perf_counter()
    together.run(inputs, split)
    middle = time.perf_counter()
    for name, rows in split.items():
        apart[name].run({name: inputs[name]}, {name: rows})
    return (middle - begun) * 1000.0, (time.perf_counter() - middle) * 1000.0


def _inputs(runner: ProgramRunner, split: Mapping[str, int]) -> dict[str, Blocks]:
    return {name: as_blocks(random_inputs(runner.signatures[name], rows)) for name, rows in split.items()}


def measure_memory(merged: MergedNetwork, batch_sizes: Sequence[int], meter: MemoryMeter) -> dict[int, float]:
    """Return the peak memory of the merged program by joint batch, in MiB; empty if it cannot be told.

    Neither the program nor the caller may refer to the originals any more, and `meter` must have been made before they
    were built. On a CPU, memory that this process freed before hides growth, so at least the weights are counted.
    """
    peaks, runner = {}, ProgramRunner(merged)
    for size in batch_sizes:
        split = even_split(tuple(merged.signatures), size)
        meter.reset()
        runner.run(_inputs(runner, split), split)
        peak_mib = meter.peak_mib()
        if peak_mib is not None:
            peaks[size] = round(max(peak_mib, merged.weights_mib), 3)
    return peaks


def profiles_of(
    merged: MergedNetwork,
    times: Sequence[JointTimes],
    memory_mib: Mapping[int, float],
    sources: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, ModelProfile]:
    """Return the profile rows: of the group, by the slowest split of each joint batch; and of its members alone."""
    rows = {"+".join(sorted(merged.signatures)): _profile(_worst(times), memory_mib, merged.weights_mib)}
    for name in merged.signatures:
        alone = [(one.share_pct, one.batch_size, one.apart) for one in times if set(one.split) == {name}]
        profile = _profile(alone, {}, None)
        update = {"network": sources[name], "options": dict(options), "run": PLAIN.chosen(None).to_data()}
        rows[name] = profile.model_copy(update=update)
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
    weights = None if weights_mib is None else round(weights_mib, 2)
    return ModelProfile(points=points, fit=fit_points(points), weights_mib=weights)
