"""Measures streaming against plain execution of one model, and how near it comes to the best possible.

A step of `scripts/gpu_check`, in a process of its own. Both sides run the code of a gpu-let without its socket: plain
batches one after the other, streamed ones on its two threads. The step works on a CPU, too, where only receiving inputs
overlaps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.deployments.gpulet.executors.streamed import make_streaming
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.gpulet.streamed_work import StreamedBatches
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.documents import parse_pairs
from tenuto.errors import TenutoError
from tenuto.mps.gpu_shares import shares_of
from tenuto.profiles.networks.inputs import Arrays, Blocks, random_inputs, sends_pixels
from tenuto.profiles.networks.model_options import PLAIN
from tenuto.profiles.networks.runner import BatchTimes, ProgramRunner, Streams
from tenuto_lab.gpu_check.results import Results, in_words

WANTED = 1.15  # times the plain throughput
VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "eager": {"cuda_graphs": False},
    "plain": PLAIN.model_dump(exclude_defaults=True),
    "compile": {"compile": True},
}
"""Ways to run: what is fast on the device, the same without CUDA graphs, nothing that changes a result, compiled."""


class _Batch:
    def __init__(self, size: int, inputs: Blocks) -> None:
        self.program = "model"
        self.size = size
        self.inputs = inputs
        self.received_at = time.perf_counter()


def compare(
    source: str, options: Mapping[str, Any], size: int, *, device: str = "cuda", seconds: float = 5.0
) -> dict[str, Any]:
    """Return throughput and times of plain and of streamed batches, and the largest difference of their results.

    The two take turns, five times each, so that clocks and neighbours are the same for both; figures are medians.

    Args:
        source: the model.
        options: how it is run.
        size: rows of a batch.
        device: `cuda` or `cpu`.
        seconds: for all measurements.

    Raises:
        TenutoError: the model cannot be run this way here.
    """
    executor = TorchExecutor(device, streaming=True)
    try:
        member = MemberEntry(name="model", source=source, options=dict(options))
        executor.load(ProgramEntry(name="model", batch_size=size, members=(member,)), [size])
        streaming = make_streaming(executor)
        streamed_runner = executor.program("model")
        signature = streamed_runner.signatures["model"]
        alone = None if executor.streams is None else Streams.one(executor.streams.kernels)
        one_by_one = ProgramRunner(streamed_runner.network, alone)  # as a gpu-let that does not stream
        inputs = [random_inputs(signature, size, seed, pixels=sends_pixels(signature)) for seed in range(3)]
        blocks = [{name: [array] for name, array in given.items()} for given in inputs]
        rows = {"model": size}
        expected = [one_by_one.run({"model": given}, rows)["model"] for given in blocks]
        difference = 0.0

        def plain(count: int) -> float:
            began = time.perf_counter()
            for number in range(count):
                one_by_one.run({"model": blocks[number % 3]}, rows)
            return time.perf_counter() - began

        def streamed(count: int) -> tuple[float, list[BatchTimes]]:
            nonlocal difference
            batches = [_Batch(size, blocks[number % 3]) for number in range(count)]
            answers: list[tuple[Arrays, BatchTimes]] = []
            errors: list[BaseException] = []
            began = time.perf_counter()
            under_way = StreamedBatches[_Batch](
                streaming,
                done=lambda _batch, outputs, times, _waited: answers.append((outputs[0], times)),
                failed=lambda _batch, error: errors.append(error),
            )
            for batch in batches:
                under_way.begin(batch, lambda batch: batch.inputs)
            under_way.end()
            took_s = time.perf_counter() - began
            if errors:
                raise errors[0]
            for number, (outputs, _) in enumerate(answers):
                difference = max(difference, _difference(expected[number % 3], outputs))
            return took_s, [times for _, times in answers]

        once_s = plain(5) / 5
        count = max(5, int(seconds / 10 / once_s))
        plain_s, streamed_s, parts = [], [], []
        for _ in range(5):
            plain_s.append(plain(count) / count)
            took_s, times = streamed(count)
            streamed_s.append(took_s / count)
            parts += times
        result: dict[str, Any] = {
            "device": executor.device,
            "batch_size": size,
            "batches": 5 * count,
            "plain_ms": statistics.median(plain_s) * 1e3,
            "streaming_ms": statistics.median(streamed_s) * 1e3,
            **{
                key: statistics.median(getattr(part, key) for part in parts)
                for key in ("copy_in_ms", "execution_ms", "copy_out_ms")
            },
            "largest_relative_difference": difference,
        }
    finally:
        executor.close()
    result["plain_rps"] = size / result["plain_ms"] * 1e3
    result["streaming_rps"] = size / result["streaming_ms"] * 1e3
    result["ratio"] = result["plain_ms"] / result["streaming_ms"]
    result["reason"] = reason_of(result)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def reason_of(result: Mapping[str, Any]) -> str:
    """Return why streaming gained less than wanted, from the measurements; empty if it gained enough."""
    if result["ratio"] >= WANTED:
        return ""
    slowest = max(("copy_in_ms", "execution_ms", "copy_out_ms"), key=lambda key: float(result[key]))
    most = result["plain_ms"] / max(result[slowest], 1e-9)
    said = (
        f"{result['ratio']:.2f} times the plain throughput: of {result['plain_ms']:.2f} ms a plain batch takes, its "
        f"slowest part, {slowest.removesuffix('_ms').replace('_', ' ')}, is {result[slowest]:.2f} ms, so that "
        f"overlapping can bring {most:.2f} times at most"
    )
    if most >= WANTED and result["streaming_ms"] > 1.05 * result[slowest]:
        idle_ms = result["streaming_ms"] - result[slowest]
        said += f"; {idle_ms:.2f} ms more pass between two batches, on the host's side of launching and answering"
    return said


def _difference(expected: Arrays, found: Arrays) -> float:
    return max(
        float(np.abs(found[name] - array).max() / max(float(np.abs(array).max()), 1e-30))
        for name, array in expected.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every variant and write the results as they come; returns 1 if one could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m tenuto_lab.gpu_check.streaming", description=__doc__)
    parser.add_argument("model", nargs="?", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each variant")
    parser.add_argument("--variants", default="", help=f"comma-separated, of {', '.join(VARIANTS)}; default all")
    parser.add_argument("--mps", action="store_true", help="be a client of CUDA MPS, as gpu-lets beside others are")
    parser.add_argument("--option", action="append", default=[], metavar="K=V", help="of the model, in every variant")
    parser.add_argument("-o", "--output", type=Path, help="JSON file; variants that it holds are not measured again")
    given = parser.parse_args(arguments)
    names = [name.strip() for name in given.variants.split(",") if name.strip()] or list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        print(f"error: no variant {unknown[0]!r}. Use {', '.join(VARIANTS)}.", file=sys.stderr)
        return 2
    try:
        with shares_of("cuda", needed=given.mps) as shares:
            if shares is not None:
                os.environ.update(shares.environment(100.0))  # CUDA has not looked for the daemon yet
            return _measure(given, names)
    except TenutoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _measure(given: argparse.Namespace, names: Sequence[str]) -> int:
    options = parse_pairs(given.option)
    results: dict[str, Any] = {"model": given.model}
    if given.output is not None and given.output.exists():
        kept = Results(given.output.parent).read(given.output.name)
        results |= {name: kept[name] for name in names if "failed" not in kept.get(name, {"failed": ""})}
    failed = False
    for name in names:
        if name in results:
            continue
        try:
            results[name] = compare(
                given.model, {**options, **VARIANTS[name]}, given.batch_size, device=given.device, seconds=given.seconds
            )
            said = results[name]["reason"] or f"{results[name]['ratio']:.2f} times the plain throughput"
        except Exception as error:  # a compiler, a driver or a kernel that fails is the result
            failed = True
            said = in_words(error)
            results[name] = {"failed": said}
        print(f"{given.model} {name}: {said}", file=sys.stderr, flush=True)
        if given.output is not None:
            Results(given.output.parent).write(given.output.name, results)
    print(json.dumps(results, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
