"""Runs one batch of a model between the start and the stop of a profiler, for `ncu --profile-from-start off`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tenuto.documents import parse_pairs
from tenuto.profiles.measuring.profile_worker import BatchOfOne
from tenuto.profiles.networks.device import cuda_streams
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import lone_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, warm up, run one batch; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tenuto_lab.gpu_check.one_batch", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--option", action="append", default=[], metavar="K=V")
    given = parser.parse_args(arguments)
    import torch

    options = parse_pairs(given.option)
    parsed = ModelOptions.parse(options, f"options of {given.model}")
    loaded = build(given.model, options=parsed.build)
    runner = lone_program("m", loaded, parsed.run, [given.batch_size], cuda_streams("cuda"))
    run = BatchOfOne(runner, given.batch_size, 0)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
