"""Latency of a model against the number of SMs that it may use, by CUDA's green contexts. On a machine without CUDA MPS
this shows what shares would cost. One process runs one model, and nothing runs beside it. A step of
`scripts/gpu_check`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tenuto.documents import parse_pairs
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.measuring.profile_worker import BatchOfOne
from tenuto.profiles.measuring.timing import Timing
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import lone_program
from tenuto.profiles.networks.runner import Streams
from tenuto_lab.gpu_check.results import Results, in_words, step_parser

_SHARES = (20, 40, 60, 80, 100)
_RUNS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `green-contexts.json`; return 1 if this torch or driver has no green contexts."""
    given = step_parser("green_contexts", __doc__).parse_args(arguments)
    results = Results(given.output)
    options = parse_pairs(given.option) | {"cuda_graphs": False}
    try:
        found = _measure(given.model, given.batch_size, options)
    except Exception as error:  # a beta interface: any refusal is the result
        found = {"failed": in_words(error)}
    results.write("green-contexts.json", {"model": given.model, "batch_size": given.batch_size, **found})
    return 1 if "failed" in found else 0


def _measure(source: str, rows: int, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError as error:
        raise EnvironmentFaultError(f"torch {torch.__version__} has no green contexts") from error
    if not SUPPORTED:
        raise EnvironmentFaultError(f"torch {torch.__version__} was built without green contexts")
    parsed = ModelOptions.parse(options, f"options of {source}")
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    points = []
    for share in _SHARES:
        sms = whole if share == 100 else max(8, int(whole * share / 100) // 8 * 8)  # in groups, of 8 on Hopper
        context: Any = None if share == 100 else GreenContext.create(num_sms=sms, device_id=0)
        if context is not None:
            context.set_context()
        try:
            stream = _stream_of(context)
            runner = lone_program("m", build(source, options=parsed.build), parsed.run, [rows], Streams.one(stream))
            run = BatchOfOne(runner, rows, 0)
            for _ in range(3):
                run()
            timing = Timing.of([run().execution_ms for _ in range(_RUNS)])
        finally:
            if context is not None:
                context.pop_context()
        points.append({"sms": sms, "kernels_ms": round(timing.median_ms, 4), "spread_ms": round(timing.spread_ms, 4)})
        print(f"{sms} of {whole} SMs: {timing.median_ms:.3f} ms", file=sys.stderr, flush=True)
    return {"whole_sms": whole, "points": points}


def _stream_of(context: Any) -> Any:
    """Return a CUDA stream of a green context, or of none. Newer versions of torch give a stream of the general kind,
    which events do not take."""
    import torch

    made: Any = context.Stream() if hasattr(context, "Stream") else None
    if made is None:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    if isinstance(made, torch.cuda.Stream):
        return made
    return torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=made.stream_id, device_index=made.device_index, device_type=made.device_type
    )


if __name__ == "__main__":
    sys.exit(main())
