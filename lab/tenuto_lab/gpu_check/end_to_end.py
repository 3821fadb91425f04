"""A model served end to end without Ray: a gpu-let in its own process, a dispatcher in this one, requests kept waiting.

The measured throughput is compared with the throughput of the gpu-let's batches alone. The difference is the way to the
gpu-let and back, and the pauses between batches. A step of `scripts/gpu_check`; it works on a CPU, too.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.tensors import InputPart
from tenuto.documents import parse_pairs
from tenuto.errors import EnvironmentFaultError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles.networks.inputs import random_inputs, sends_pixels
from tenuto_lab.gpu_check.local_gpulets import LocalGpulets
from tenuto_lab.gpu_check.results import Results, in_words, step_parser

_WAITING = 3  # batches' worth of requests are under way at any time, so that the gpu-let never waits for one
_SLO_MS = 10_000.0
_WARM_UP = 0.2  # of the time; its answers are not counted
_READY_S = 120.0


async def serve_closed_loop(plan: Plan, seconds: float) -> dict[str, Any]:
    """Serve a plan's only model and return throughput and times, in ms.

    Args:
        plan: one gpu-let with one model.
        seconds: for how long requests are sent.

    Raises:
        EnvironmentFaultError: the gpu-let does not start, or answers nothing.
    """
    (model,), (gpulet,) = plan.models, plan.gpulets
    size = gpulet.models[0].batch_size
    async with LocalGpulets(Deployment(plan=plan, executor="torch").config()) as local:
        dispatcher = Dispatcher(lambda plan, network: make_scheduler("eager", from_plan(plan, network), {}), local.find)
        dispatcher.apply(plan)
        try:
            async with asyncio.timeout(_READY_S):
                while not dispatcher.is_ready():
                    await asyncio.sleep(0.01)
            signature = dispatcher.signature(model.name)
            if signature is None:
                raise EnvironmentFaultError(f"gpu-let {gpulet.id} says nothing of {model.name}")
            arrays = random_inputs(signature, 1, 0, pixels=sends_pixels(signature))
            parts = [
                InputPart(array.tobytes(), "" if array.dtype.name == tensor.dtype else array.dtype.name)
                for tensor in signature.inputs
                for array in (arrays[tensor.name],)
            ]
            until_s = time.monotonic() + seconds
            found: list[tuple[float, float, Answer]] = []

            async def client() -> None:
                while (began_s := time.monotonic()) < until_s:
                    answer = await ask(dispatcher, model.name, parts)
                    found.append((began_s, time.monotonic(), answer))

            await asyncio.gather(*(client() for _ in range(_WAITING * size)))
            (described,) = dispatcher.gpulets()
        finally:
            await dispatcher.close()
    return {"device": described.device, **figures_of(found, until_s - (1 - _WARM_UP) * seconds, until_s)}


def figures_of(found: Sequence[tuple[float, float, Answer]], since_s: float, until_s: float) -> dict[str, Any]:
    """Return throughput and times of the answers (begun, ended, answer) between two times, beside the batches alone."""
    counted = [(began, ended, a) for began, ended, a in found if since_s <= ended <= until_s]
    ok = [(ended - began, a) for began, ended, a in counted if a.outcome is Outcome.OK]
    if not ok:
        reasons = sorted({a.reason for _, _, a in found if a.reason}) or ["nothing was answered in time"]
        raise EnvironmentFaultError("; ".join(reasons))
    rows_per_s = len(ok) / (until_s - since_s)
    batch = statistics.fmean(a.batch_size for _, a in ok)
    execution_ms = statistics.median(a.execution_ms for _, a in ok)
    by_batches = statistics.fmean(a.batch_size / a.execution_ms for _, a in ok) * 1e3
    return {
        "rows_per_s": round(rows_per_s, 1),
        "rows_per_s_of_batches_alone": round(by_batches, 1),
        "part_of_it": round(rows_per_s / by_batches, 4),
        "mean_batch": round(batch, 2),
        "execution_ms": round(execution_ms, 3),
        "round_trip_ms": round(statistics.median(t for t, _ in ok) * 1e3, 3),
        "not_ok": len(counted) - len(ok),
    }


def plan_of_one(
    source: str, options: dict[str, Any], size: int, gpu: dict[str, Any], device: str, streaming: bool
) -> Plan:
    """Return a plan of one gpu-let with one model."""
    cuda = {"type": gpu.get("type", "gpu"), "uuid": gpu.get("uuid")}
    guess = {"alpha_ms": 0.1, "beta_ms": 1.0}  # it decides nothing: waiting requests run at once
    return Plan.from_data(
        {
            "policy": {"name": "gpu-check"},
            "mps": "off",
            "streaming": streaming,
            "gpus": [{"id": "here/0", **(cuda if device == "cuda" else {"type": "cpu"})}],
            "gpulets": [
                {"id": "here/0/a", "gpu": "here/0", "models": [{"name": "m", "batch_size": size, "latency": guess}]}
            ],
            "models": [
                {
                    "name": "m",
                    "source": source,
                    "rate_rps": 1.0,
                    "slo_ms": _SLO_MS,
                    "options": options,
                    "latency": guess,
                }
            ],
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `served.json`, plain and streamed; returns 1 if either could not be served."""
    parser = step_parser("end_to_end", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each way")
    given = parser.parse_args(arguments)
    results = Results(given.output)
    options = parse_pairs(given.option)
    written: dict[str, Any] = {"model": given.model, "batch_size": given.batch_size}
    for way in ("plain", "streamed"):
        try:
            plan = plan_of_one(
                given.model, options, given.batch_size, results.read("inventory.json"), given.device, way == "streamed"
            )
            written[way] = asyncio.run(serve_closed_loop(plan, given.seconds))
        except TimeoutError:
            written[way] = {"failed": f"the gpu-let was not ready within {_READY_S:g} s"}
        except Exception as error:  # a gpu-let that ends, a socket that cannot be opened: such an error is the result
            written[way] = {"failed": in_words(error)}
        results.write("served.json", written)
        print(f"{given.model} {way}: {written[way]}", file=sys.stderr, flush=True)
    return 1 if any("failed" in written[way] for way in ("plain", "streamed")) else 0


if __name__ == "__main__":
    sys.exit(main())
