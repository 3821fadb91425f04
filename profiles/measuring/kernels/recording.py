"""Record the kernels of one batch with torch.profiler, in the process that runs the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tenuto.errors import EnvironmentFaultError, first_line
from tenuto.profiles.measuring.kernels.chrome_trace import KernelTrace, load_chrome_trace


def write_trace(run: Callable[[], object], path: Path) -> None:
    """Run once under torch.profiler and export the trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))


def record_kernels(run: Callable[[], object]) -> KernelTrace:
    """Return the kernels and copies of one run.

    Raises:
        InvalidInputError: no kernels were recorded, for example on a CPU, or because CUPTI is not permitted.
        EnvironmentFaultError: the profiler fails, or there is no room for its trace.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            write_trace(run, path)
            return load_chrome_trace(path)
    except (RuntimeError, OSError) as error:  # what Kineto and CUPTI raise where they are not permitted
        raise EnvironmentFaultError(
            f"torch.profiler cannot record: {first_line(error)}. Kernel times are left out."
        ) from error
