"""USHER's Algorithms 1 and 2 against a brute-force reference that shares no code with them."""

from __future__ import annotations

import random

import pytest

from lab.tests.baselines.usher import reference
from tenuto.placement import Cluster, Workload, load_policy
from tenuto.profiles import Profile, Profiles

KINDS = {"v100": 3.06, "a100": 3.67, "t4": 0.526}


def case(seed: int, *, elastic: bool) -> tuple[list[reference.Model], dict[str, int]]:
    """Return four to six models, some compute-heavy, some memory-heavy, some neither, on one to three GPU types."""
    rng = random.Random(seed)
    kinds = rng.sample(list(KINDS), rng.choice([1, 1, 2, 2, 3]))
    counts = {kind: rng.randint(1, 3) for kind in sorted(kinds, key=list(KINDS).index)}
    models = []
    for index in range(rng.randint(4, 6)):
        compute, memory = rng.choice([(1.0, 0.3), (0.3, 1.0), (0.8, 0.8), (1.0, 0.5), (0.5, 1.0)])
        scale, rps = rng.uniform(15, 45), rng.uniform(50, 200)
        needs = {}
        for kind in counts:
            speed = {"v100": 1.0, "a100": 1.7, "t4": 0.4}[kind] * rng.uniform(0.8, 1.2)
            sizes = [4, 8] if elastic else rng.sample([4, 8, 16], rng.choice([2, 2, 3]))
            needs[kind] = {
                size: (
                    round(min(98.0, scale * compute * (1 + 0.3 * step) / speed**0.5), 3),
                    round(min(98.0, scale * memory * (1 + 0.5 * step)), 3),
                    round(rps * speed * (1 + 0.4 * step), 2),
                )
                for step, size in enumerate(sorted(sizes))
            }
        most = max(n[2] for by_size in needs.values() for n in by_size.values())
        models.append(reference.Model(f"m{index}", round(rng.uniform(0.3, 2.2) * most, 2), needs))
    return models, counts


def planned(
    models: list[reference.Model],
    counts: dict[str, int],
    groups: list[list[reference.Model]],
    *,
    elastic: bool,
    **options: object,
) -> tuple[float, float, dict[str, float]]:
    """Return goodput, cost of the used GPUs, and goodput by model as the policy plans."""
    profiles = [
        Profile.model_validate(
            {
                "name": f"made-up-{kind}",
                "gpu_type": kind,
                "source": "test",
                "coefficients": {"context_mib": 0.0},
                "models": {
                    model.name: {
                        "points": [
                            {
                                "batch_size": size,
                                "latency_ms": 1000.0 * size / rps,
                                "throughput_rps": rps,
                                "metrics": {"creq": compute, "mreq": memory},
                            }
                            for size, (compute, memory, rps) in model.needs[kind].items()
                        ]
                    }
                    for model in models
                },
            }
        )
        for kind in counts
    ]
    workload = Workload.model_validate(
        {"models": [{"name": m.name, "rate_rps": m.rate, "slo_ms": 100_000} for m in models]}
    )
    cluster = Cluster.parse(",".join(f"{kind}:{count}" for kind, count in counts.items()), elastic=elastic)
    named = ",".join("+".join(model.name for model in group) for group in groups)
    raw = {"compute_metric": "creq", "memory_metric": "mreq", "groups": named, **options}
    plan = load_policy("usher", raw).place(workload, cluster, Profiles(profiles))
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    cost = sum(KINDS[types[gpu]] for gpu in {gpulet.gpu for gpulet in plan.gpulets})
    return plan.expected.goodput_rps, cost, {n: m.goodput_rps for n, m in plan.expected.models.items()}


def groups_of(models: list[reference.Model], seed: int) -> list[list[reference.Model]]:
    shuffled = random.Random(seed).sample(models, len(models))
    found = [shuffled[start : start + 4] for start in range(0, len(shuffled), 4)]
    return [sorted(group, key=models.index) for group in found]  # configurations are compared in the workload's order


READINGS: dict[str, dict[str, object]] = {
    "as published": {},
    "neutral last": {"neutral": "last"},
    "pairs together": {"pairs": "together"},
    "CM": {"classify": False},
    "WD": {"replication": False},
    "S": {"sort": False},
}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("elastic", [False, True])
def test_every_random_workload_is_planned_as_the_reference_plans_it(reading: str, elastic: bool) -> None:
    options = READINGS[reading]
    first = 0 if reading == "as published" else 20
    for seed in range(first, first + ((2 if elastic else 4) if reading == "as published" else 1)):
        models, counts = case(1000 * seed + elastic, elastic=elastic)
        groups = groups_of(models, seed)
        if elastic:
            groups = [group[:3] for group in groups]
            models = [model for model in models if any(model in group for group in groups)]
        prices = {kind: KINDS[kind] for kind in counts}
        expected = reference.solve(groups, counts, prices, elastic=elastic, readings=reference.Readings(**options))  # type: ignore[arg-type]
        goodput, cost, by_model = planned(models, counts, groups, elastic=elastic, **options)
        assert goodput == pytest.approx(expected[0], rel=1e-6), seed
        assert {n: pytest.approx(g, abs=1e-3) for n, g in expected[2].items() if g} == by_model, seed
        if elastic:
            assert cost == pytest.approx(expected[1]), seed
