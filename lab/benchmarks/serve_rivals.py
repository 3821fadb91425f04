"""The Ray Serve application that Tenuto is measured against: `@serve.batch` on the same emulated model."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve

batch_app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(batch_app)
class ServeBatch:
    """`@serve.batch` over a model that takes alpha*b + beta ms, one batch at a time, off the event loop."""

    def __init__(self, alpha_ms: float, beta_ms: float, max_batch: int, wait_ms: float) -> None:
        """Take the model's line and the batching window."""
        self._alpha_ms, self._beta_ms = alpha_ms, beta_ms
        self._device = ThreadPoolExecutor(1)
        self._run.set_max_batch_size(max_batch)  # type: ignore[attr-defined]
        self._run.set_batch_wait_timeout_s(wait_ms / 1000.0)  # type: ignore[attr-defined]

    @serve.batch(max_batch_size=18, batch_wait_timeout_s=0.02, max_concurrent_batches=1)
    async def _run(self, items: list[int]) -> list[int]:
        seconds = (self._alpha_ms * len(items) + self._beta_ms) / 1000.0
        await asyncio.get_running_loop().run_in_executor(self._device, time.sleep, seconds)
        return items

    @batch_app.get("/v2/models/synthetic")
    async def metadata(self) -> dict[str, Any]:
        """Answer like an Open Inference Protocol server, for the load generator."""
        return {
            "name": "synthetic",
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 1]}],
            "outputs": [],
        }

    @batch_app.post("/v2/models/synthetic/infer")
    async def infer(self, request: Request) -> JSONResponse:
        """Read the body as any server must, and wait for the batch."""
        await request.body()
        await self._run(0)
        return JSONResponse({"outputs": []})


def serve_batch(args: dict[str, Any]) -> Any:
    """Build the `@serve.batch` application; `args` has alpha_ms, beta_ms, max_batch, wait_ms, replicas, queued,
    ongoing."""
    options = {
        "num_replicas": args["replicas"],
        "max_ongoing_requests": args["ongoing"],
        "max_queued_requests": args["queued"],
    }
    return ServeBatch.options(**options).bind(args["alpha_ms"], args["beta_ms"], args["max_batch"], args["wait_ms"])
