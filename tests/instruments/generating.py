"""Models that generate on made-up profiles, and a policy that plans them by the closed form, without trials."""

from __future__ import annotations

from typing import Any

from tenuto.placement import Cluster
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.policy import Abilities
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Generation, ModelProfile, Profile, ProfilePoint, Profiles, StepsAt

KIND = "a100-80gb"
FAST = {"prefill_ms": ((32, 12.0), (1032, 162.0)), "decode_ms": ((1, 11.0), (64, 13.0), (264, 33.0))}
SLOW = {"prefill_ms": ((32, 16.0), (1032, 416.0)), "decode_ms": ((1, 16.0), (64, 20.0), (264, 80.0))}
WRITES = ModelProfile(
    weights_mib=13_000.0,
    generation=Generation(
        kv_bytes_per_token=524_288.0,
        longest_context=2048,
        steps=(
            StepsAt.model_validate({**FAST, "context_token_ms": 0.0004}),
            StepsAt.model_validate({**SLOW, "context_token_ms": 0.0006, "share_pct": 30}),
        ),
    ),
)
FIXED = ModelProfile(
    points=tuple(ProfilePoint(batch_size=b, latency_ms=5.0 + b, memory_mib=3000.0) for b in (1, 2, 4, 8, 16)),
    weights_mib=500.0,
)
PROFILES = Profiles(
    [Profile(name="p", gpu_type="a100-80gb", source="made up", models={"writes": WRITES, "fixed": FIXED})]
)


def writes(name: str = "llm", rate_rps: float = 2.0, **more: Any) -> ModelSpec:
    given = {
        "name": name,
        "profile": "writes",
        "rate_rps": rate_rps,
        "slo": {"ttft_ms": 1000, "tpot_ms": 50},
        "generates": {"prompt_tokens": 100, "output_tokens": 100},
    }
    return ModelSpec.model_validate(given | more)


def fixed(rate_rps: float = 50.0) -> ModelSpec:
    return ModelSpec(name="fixed", rate_rps=rate_rps, slo_ms=100.0)


def together(count: int, faster: float) -> tuple[StepsAt, ...]:
    """Return the steps of `WRITES` on several GPUs, so many times as fast as on one."""
    assert WRITES.generation is not None
    scaled = WRITES.generation.scaled(1.0 / faster).steps
    return tuple(at.model_copy(update={"tensor_parallel": count}) for at in scaled)


def cluster(nodes: int = 2, each: int = 2, *, elastic: bool = False, **more: Any) -> Cluster:
    """Return nodes with so many GPUs each, in two racks."""
    group = {"type": KIND, "count": each, **more}
    given = [{"name": f"n{i}", "rack": f"r{i % 2}", "gpus": [group]} for i in range(nodes)]
    return Cluster.model_validate({"nodes": given, "elastic": elastic})


def only_together() -> Profiles:
    """Return profiles of a model whose weights fill more than one GPU."""
    assert WRITES.generation is not None
    more = WRITES.generation.model_copy(update={"steps": together(2, 1.5)})
    rows = {
        "large": WRITES.model_copy(update={"generation": more, "weights_mib": 90_000.0}),
        "writes": WRITES,
        "fixed": FIXED,
    }
    return Profiles([Profile(name="p", gpu_type=KIND, source="made up", models=rows)])


class ByForm(Symphony):
    """Symphony for models of fixed cost, and the closed form for those that generate."""

    abilities = Abilities(generation="shares")
