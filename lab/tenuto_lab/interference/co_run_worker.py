"""One process of a co-run: builds its model, says it is ready, runs it without pause for as long as it is told.

Started as `python -m tenuto_lab.interference.co_run_worker` by `tenuto_lab.interference.co_run`; not meant to be run
by hand. Reads the request and then the seconds, one line each; reports one JSON object a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tenuto.errors import TenutoError
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.recording import record_kernels
from tenuto.profiles.measuring.profile_worker import DEVICE_TIMES, BatchOfOne, describe_machine
from tenuto.profiles.measuring.worker_process import serve_parent
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.device import cuda_streams, is_fast_device, pick_device
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.networks.programs import lone_program
from tenuto_lab.interference.co_run import CO_RUN_EVENTS, CO_RUN_REQUESTS, CoRunRequest, Ran, Ready

_WARM_UP_RUNS = 3


def main(clock_s: Callable[[], float] = time.monotonic) -> None:
    """Serve one co-run; faults are reported as events. `clock_s` is one for all processes of a machine."""
    serve_parent(
        lambda report: _serve(CO_RUN_REQUESTS.validate_json(sys.stdin.buffer.readline()), report, clock_s),
        CO_RUN_EVENTS,
    )


def _serve(request: CoRunRequest, report: Callable[[Ready | Ran], None], clock_s: Callable[[], float]) -> None:
    import torch

    from tenuto.profiles.networks.models import build

    device = pick_device(request.device)
    options = ModelOptions.parse(request.options, f"options of {request.source}")
    loaded = build(request.source, weights_path=request.weights_path, seed=request.seed, options=options.build)
    if device == "cpu":
        torch.set_num_threads(cpu_threads(request.share_pct))
    streams = cuda_streams(device, overlapping=is_fast_device(device))
    runner = lone_program(request.source, loaded, options.run, (request.batch_size,), streams)
    run = BatchOfOne(runner, request.batch_size, request.seed)
    for _ in range(_WARM_UP_RUNS):
        run()
    recorded = _record(run) if device == "cuda" else None  # the first start of CUPTI is slow
    report(Ready(device, describe_machine(device).sm_count))
    told = sys.stdin.readline().strip()
    if not told:
        return  # another process of the co-run failed
    seconds = float(told)
    began: list[float] = []
    ended: list[float] = []
    splits: dict[str, list[float]] = {name: [] for name in DEVICE_TIMES} if runner.on_cuda else {}
    until = clock_s() + seconds
    metrics: dict[str, float] = {}
    half = until - seconds / 2
    while not ended or ended[-1] < until:
        if recorded is not None and clock_s() >= half:
            metrics, recorded = _record(run) or {}, None  # between two timed batches, while the others run
        began.append(clock_s())
        times = run()
        ended.append(clock_s())
        for name, values in splits.items():
            values.append(getattr(times, DEVICE_TIMES[name]))
    if recorded is not None:
        metrics = _record(run) or {}  # one batch took more than the second half: now, as the others end
    report(Ran(tuple(began), tuple(ended), {name: tuple(values) for name, values in splits.items()}, metrics))


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
