"""NVIDIA Triton (the CPU binary of the `nvidia-pytriton` wheel, Python backend) as a rival over the same HTTP.

Installed on demand into an environment of its own, which you remove by hand; never a dependency of the project. Its
settings are those that served most here: batches of at most 7, a queue policy that rejects after 12 of 25 ms, four HTTP
threads, no metrics. Each model instance is a process of its own, as gpu-lets are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

WHEEL = "nvidia-pytriton==0.7.0"
MOST_ROWS = 7
REJECT_PART = 12.0 / 25.0  # of the SLO
SETTINGS = f"max batch {MOST_ROWS}, rejects after {REJECT_PART:.0%} of the SLO in its queue, 4 HTTP threads"

_CONFIG = """
name: "synthetic"
backend: "python"
max_batch_size: {most}
input [{{ name: "INPUT0" data_type: TYPE_{datatype} dims: {dims} }}]
output [{{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ count: {instances} kind: KIND_CPU }}]
dynamic_batching {{
  default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: {reject_us} }}
}}
"""

# The same emulation as ours and the floor's: sleep, and spin where a sleep would overshoot.
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        begin = time.monotonic()
        inputs = [pb.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        end = begin + ({alpha_ms} * sum(len(rows) for rows in inputs) + {beta_ms}) / 1000.0
        time.sleep(max(0.0, end - time.monotonic() - 5e-5))
        while time.monotonic() < end:
            pass
        return [pb.InferenceResponse([pb.Tensor("OUTPUT0", np.zeros((len(rows), 1), np.float32))]) for rows in inputs]
"""


def installed(wheel: str = WHEEL) -> Path | None:
    """Return the folder of pytriton's `tritonserver`, installing it where it is not yet; None where that fails, with a
    line that says why.

    Args:
        wheel: what to give pip: a requirement or the path of the wheel.
    """
    home = Path(tempfile.gettempdir()) / "tenuto-benchmark-triton"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = home / "lib" / f"python{version}" / "site-packages" / "pytriton" / "tritonserver"
    try:
        if not (server / "bin" / "tritonserver").exists():
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True)
            # The stub of the Python backend imports the numpy of the `python3` on the path, and knows none from 2 on.
            subprocess.run(
                [home / "bin" / "pip", "install", "--quiet", "--no-deps", wheel, "numpy<2"],
                check=True,
                capture_output=True,
                text=True,
            )
        stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy2(stub, server / "backends" / "python")
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        print(f"Triton is skipped: {wheel} cannot be installed here: {said[-1] if said else error}", flush=True)
        return None
    return server


@contextlib.contextmanager
def triton(
    server: Path,
    port: int,
    *,
    instances: int,
    alpha_ms: float,
    beta_ms: float,
    slo_ms: float,
    datatype: str = "FP32",
    shape: Sequence[int] = (1,),
    grpc_port: int | None = None,
) -> Iterator[int]:
    """Serve the model `synthetic` of alpha * n + beta ms on so many instances until the context ends; yields the
    process. `grpc_port`: no gRPC without one.

    Raises:
        RuntimeError: it ended, or was not ready in a minute.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "models" / "synthetic"
        (model / "1").mkdir(parents=True)
        reject_us = round(1000.0 * REJECT_PART * slo_ms)
        settings = _CONFIG.format(
            most=MOST_ROWS, instances=instances, reject_us=reject_us, datatype=datatype, dims=list(shape)
        )
        (model / "config.pbtxt").write_text(settings)
        (model / "1" / "model.py").write_text(_MODEL.format(alpha_ms=alpha_ms, beta_ms=beta_ms))
        log = Path(folder) / "log"
        python = server.parents[4] / "bin"
        process = subprocess.Popen(
            [
                server / "bin" / "tritonserver",
                "--model-repository",
                model.parent,
                "--backend-directory",
                server / "backends",
                "--http-address",
                "127.0.0.1",
                "--http-port",
                str(port),
                "--http-thread-count",
                "4",
                *(["--allow-grpc", "false"] if grpc_port is None else ["--grpc-port", str(grpc_port)]),
                "--allow-metrics",
                "false",
            ],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "LD_LIBRARY_PATH": _python_libraries()},
        )
        try:
            _wait_until_ready(process, port, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _python_libraries() -> str:
    """Return where the stub finds libpython."""
    import sysconfig

    known = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([str(sysconfig.get_config_var("LIBDIR")), *([known] if known else [])])


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 60.0
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready"):
            return
        time.sleep(0.2)
    said = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise RuntimeError(f"tritonserver did not become ready:\n{said}")
