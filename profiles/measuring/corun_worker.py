"""One process of a co-run: builds its model, says it is ready, runs it without pause for as long as it is told.

Started as `python -m tenuto.profiles.measuring.corun_worker` by `tenuto.profiles.measuring.corun`; not meant to be run
by hand. Reads the request and then the seconds, one line each; reports one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.errors import InvalidInputError, TenutoError
from tenuto.profiles.measuring.corun import CoRunRequest
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.recording import record_kernels
from tenuto.profiles.measuring.worker import random_inputs
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.torch_runner import TorchRunner, pick_device, split_options

__all__ = ["main"]

_WARM_UP_RUNS = 3


def main() -> None:
    """Serve one co-run; faults are reported as events."""
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        os.dup2(2, 1)  # whatever a model prints goes to stderr

        def report(event: Mapping[str, Any]) -> None:
            reports.write(json.dumps(event) + "\n")

        try:
            _serve(CoRunRequest(**json.loads(sys.stdin.readline())), report)
        except TenutoError as error:
            kind = "InvalidInputError" if isinstance(error, InvalidInputError) else "EnvironmentFaultError"
            report({"event": "error", "kind": kind, "text": str(error)})
        except KeyboardInterrupt:
            sys.exit(130)


def _serve(request: CoRunRequest, report: Callable[[Mapping[str, Any]], None]) -> None:
    import torch

    from tenuto.profiles.networks.models import build

    device = pick_device(request.device)
    run_options, build_options = split_options(request.options, f"options of {request.source}")
    loaded = build(request.source, weights_path=request.weights_path, seed=request.seed, options=build_options)
    if device == "cpu":
        torch.set_num_threads(cpu_threads(request.share_pct))
    runner = TorchRunner(loaded, device, run_options, batch_sizes=(request.batch_size,))
    inputs = random_inputs(runner.signature, request.batch_size, request.seed)
    for _ in range(_WARM_UP_RUNS):
        runner.run(inputs, request.batch_size)

    def run() -> object:
        return runner.run(inputs, request.batch_size)

    recorded: dict[str, float] | None = _record(run) if device == "cuda" else None  # the first start of CUPTI is slow
    report({"event": "ready", "device": device})
    told = sys.stdin.readline().strip()
    if not told:
        return  # another process of the co-run failed
    seconds = float(told)
    began: list[float] = []
    ended: list[float] = []
    splits: dict[str, list[float]] = {}
    until = time.monotonic() + seconds  # one clock for all processes of a machine
    metrics: dict[str, float] = {}
    half = until - seconds / 2
    while not ended or ended[-1] < until:
        if recorded is not None and time.monotonic() >= half:
            metrics, recorded = _record(run) or {}, None  # between two timed batches, while the others run
        began.append(time.monotonic())
        if runner.on_cuda:
            for key, value in runner.split_times_ms(inputs, request.batch_size).items():
                splits.setdefault(key, []).append(value)
        else:
            runner.run(inputs, request.batch_size)
        ended.append(time.monotonic())
    if recorded is not None:
        metrics = _record(run) or {}  # one batch took more than the second half: now, as the others end
    report({"event": "runs", "began": began, "ended": ended, "splits": splits, "metrics": metrics})


def _record(run: Callable[[], object]) -> dict[str, float] | None:
    """Return number of kernels and the time between them of one batch, or None where they cannot be recorded."""
    try:
        trace = record_kernels(run)
        found = kernel_metrics(trace.kernels, trace.device)
    except TenutoError:
        return None
    return {name: found[name] for name in ("kernels", "kernel_ms", "kernel_gap_ms")}


if __name__ == "__main__":
    main()
