"""Goodput by both bounds of the order of steps that serves, beside published ones, on random models that generate.

A scene is drawn from a seed: one of the shipped LLaMAs and OPTs with a share, lengths of prompts and outputs, an SLO,
memory, and how its requests come. Each scene runs in virtual time at parts of the load that the planner's closed form
gives (below, at and beyond capacity), the same requests under each order. Counted is in how many runs an order is
within a point of the best, and what it serves in the mean.

Run: python lab/benchmarks/bench_step_orders.py [--seeds 20] [--first-seed 1] [--loads 0.7,1,1.3]
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import StepLimits, StepOrder
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.placement.generation_capacity import carried
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import StepCost
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.rivals.step_orders import DecodeFirst, LeastSlack, PrefillFirst, RoundRobin

REQUESTS, WARMUP = 3000, 300
WITHIN = 0.01
LIMITS = (256, 2048)
ORDERS: dict[str, Callable[[StepCost], StepOrder | None]] = {
    "ours": lambda cost: DeferredSteps(cost, LIMITS[1]),
    "chunked": lambda _cost: None,
    "prefill first": PrefillFirst,
    "decode first": DecodeFirst,
    "round robin": RoundRobin,
    "least slack": LeastSlack,
}


@dataclass(frozen=True)
class Scene:
    """One gpu-let's model, what carries it, and how its requests come (1: a Poisson stream)."""

    spec: ModelSpec
    cost: StepCost
    kv_tokens: int
    burstiness: float
    about: str


def scene(seed: int) -> Scene | None:
    """Return the scene of a seed; None where its SLO cannot be kept by one request alone."""
    rng = random.Random(f"steps {seed}")
    store, row = rng.choice(
        [("muxserve-a100", f"llama-{size}") for size in ("7b", "13b", "30b")] + [("distserve-a100", "opt-13b")]
    )
    generation = load_shipped(store).models[row].generation
    assert generation is not None
    known = sorted({at.share_pct for at in generation.steps if at.tensor_parallel == 1})
    if not known:
        return None
    share = rng.choice(known)
    cost = generation.cost(share)
    prompt, output = round(math.exp(rng.uniform(3.5, 7.0))), round(math.exp(rng.uniform(3.0, 6.2)))
    sigma = rng.uniform(0.0, 1.2)
    prompt_most = min(6 * prompt, 4000)
    slack = rng.choice((2.0, 4.0, 8.0))  # as published: SLOs in multiples of what a request alone takes
    alone = cost.ms(min(prompt, LIMITS[1])), cost.ms(0, 1, prompt + output)
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "rate_rps": 1,
            "slo": {"ttft_ms": slack * alone[0] + 2 * alone[1], "tpot_ms": rng.choice((1.5, 2.0, 4.0)) * alone[1]},
            "generates": {
                "prompt_tokens": {"lognormal": {"median": prompt, "sigma": sigma, "most": prompt_most}},
                "output_tokens": {"lognormal": {"median": output, "sigma": rng.uniform(0.0, 1.0), "most": 6 * output}},
                "max_sequences": LIMITS[0],
                "max_batch_tokens": LIMITS[1],
            },
        }
    )
    kv_tokens = max(round(math.exp(rng.uniform(9.0, 12.0))), 2 * (prompt_most + 6 * output))
    about = f"{row} {share:g} %, {prompt}+{output} tokens, SLO {spec.slo.ttft_ms:.0f}/{spec.slo.tpot_ms:.0f} ms"  # type: ignore[union-attr]
    return Scene(spec, cost, kv_tokens, rng.choice((1.0, 1.0, 3.0)), about)


def in_time(scene: Scene, order: StepOrder | None, rate_rps: float, seed: int) -> float:
    """Return the part of the measured requests that kept both bounds."""
    spec, draws = scene.spec, np.random.default_rng(seed)
    generates, slo = spec.generates, spec.slo
    assert generates is not None
    assert slo is not None
    assert generates.prompt_tokens is not None
    assert generates.output_tokens is not None
    shape = 1.0 / scene.burstiness
    gaps = draws.gamma(shape, 1000.0 / rate_rps / shape, REQUESTS)
    arrivals = np.cumsum(gaps).tolist()
    prompts = generates.prompt_tokens.draw(REQUESTS, draws).tolist()
    outputs = generates.output_tokens.draw(REQUESTS, draws).tolist()
    replica = VirtualSteps(StepLimits(*LIMITS, scene.kv_tokens), scene.cost, order=order)
    knows = order is not None
    for number, (at, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True)):
        replica.advance(at)
        replica.add(at, number, prompt, output, *((at + slo.ttft_ms, slo.tpot_ms) if knows else ()))
    while replica.due_ms < INF:
        replica.advance(replica.due_ms)
    kept = 0
    for number, last in replica.last_ms.items():
        if WARMUP <= number < REQUESTS - WARMUP:
            first = replica.first_ms[number]
            tpot = (last - first) / max(1, outputs[number] - 1)
            kept += first - arrivals[number] <= slo.ttft_ms + 1e-6 and tpot <= slo.tpot_ms + 1e-6
    return kept / (REQUESTS - 2 * WARMUP)


def main() -> None:
    """Run all scenes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--loads", default="0.7,1,1.3")
    asked = parser.parse_args()
    loads = [float(load) for load in asked.loads.split(",")]
    runs: dict[float, list[list[float]]] = {load: [] for load in loads}
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        made = scene(seed)
        if made is None:
            continue
        capacity, _ = carried(made.spec, made.cost, made.kv_tokens)
        if not capacity:
            continue
        for load in loads:
            row = [in_time(made, make(made.cost), load * capacity, seed) for make in ORDERS.values()]
            runs[load].append(row)
            mark = "" if row[0] >= max(row) - WITHIN else "  <-- ours is worse"
            print(f"seed {seed:3d} load {load:.2f}  " + " ".join(f"{100 * x:6.1f}" for x in row), made.about, mark)
    print(f"\n{'load':>6} {'runs':>5}  within a point of the best; mean part in time (%)")
    for load, rows in runs.items():
        table = np.array(rows)
        near = (table >= table.max(axis=1, keepdims=True) - WITHIN).sum(axis=0)
        told = (
            f"{name} {n} / {100 * mean:.1f}" for name, n, mean in zip(ORDERS, near, table.mean(axis=0), strict=True)
        )
        print(f"{load:6.2f} {len(rows):5d}  " + ", ".join(told))


if __name__ == "__main__":
    main()
