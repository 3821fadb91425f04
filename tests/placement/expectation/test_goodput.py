"""The flow of requests over gpu-lets that a promise rests on."""

from __future__ import annotations

import pytest

from tenuto.placement import Plan
from tenuto.placement.expectation.goodput import expected_of


def test_one_queue_keeps_alike_gpulets_equally_busy() -> None:
    """Two GPUs alike: a model on both, and beside it on each another one, which its batches slow down alike."""

    def replica(name: str) -> dict[str, object]:
        return {"name": name, "batch_size": 4, "slowdown": 2.0, "latency": {"alpha_ms": 2.0, "beta_ms": 2.0}}

    places = [("x", 0, "both"), ("y", 0, "left"), ("z", 1, "both"), ("w", 1, "right")]
    plan = Plan.from_data({
        "policy": {"name": "hand"}, "gpus": [{"id": f"n0/{i}", "type": "v100"} for i in range(2)],
        "gpulets": [{"id": let, "gpu": f"n0/{gpu}", "share_pct": 50, "models": [replica(name)]}
                    for let, gpu, name in places],
        "models": [{"name": name, "rate_rps": 250, "slo_ms": 40} for name in ("both", "left", "right")],
    })  # fmt: skip
    models = expected_of(plan).models
    assert models["left"].goodput_rps == pytest.approx(models["right"].goodput_rps)
    assert models["left"].goodput_rps < 250
