"""Symphony's appendix A: the partition against enumeration, its limits, and its evaluation at 800 models."""

from __future__ import annotations

import itertools
import random

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement.policies.symphony.partition import (
    Partition,
    PartitionLimits,
    PartitionModel,
    fits_some,
    gpus_by_need,
    partition,
)
from tests.instruments.seeds import seeds


def model(
    name: str, rate: float = 100.0, memory: float = 100.0, dynamic: float = 0.0, need: float = 1.0
) -> PartitionModel:
    return PartitionModel(name, need, rate, memory, dynamic)


def deviations(models: list[PartitionModel], choice: list[int], count: int, weight: float) -> float:
    """Return dR / R + w dS / S of an assignment, from its definition."""
    found = 0.0
    for values, part in (([m.rate_rps for m in models], 1.0), ([m.static_mib for m in models], weight)):
        mean = sum(values) / count
        sums = [sum(v for v, k in zip(values, choice, strict=True) if k == g) for g in range(count)]
        found += part * max(abs(s - mean) for s in sums) / mean
    return found


def members(found: Partition, subcluster: int) -> list[PartitionModel]:
    return [model for model in found.models if found.assignment[model.name] == subcluster]


def best_by_enumeration(models: list[PartitionModel], count: int, limits: PartitionLimits) -> float:
    best = float("inf")
    for choice in itertools.product(range(count), repeat=len(models)):
        groups = [[m for m, k in zip(models, choice, strict=True) if k == g] for g in range(count)]
        if any(
            not g
            or sum(m.static_mib for m in g) + max(m.dynamic_mib for m in g) > (limits.memory_mib or float("inf"))
            or sum(m.rate_rps for m in g) > (limits.max_rate_rps or float("inf"))
            for g in groups
        ):
            continue
        best = min(best, deviations(models, list(choice), count, limits.memory_weight))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_no_partition_is_better_than_the_one_found(seed: int) -> None:
    rng = random.Random(seed)
    models = [model(f"m{i}", rng.uniform(10, 500), rng.uniform(50, 400), rng.uniform(0, 300)) for i in range(7)]
    limits = PartitionLimits(
        memory_mib=1200.0, max_rate_rps=900.0 if seed % 2 else None, memory_weight=(1.0, 0.3)[seed % 2]
    )
    best = best_by_enumeration(models, 3, limits)
    if best == float("inf"):
        with pytest.raises(InvalidInputError):
            partition(models, 3, limits=limits)
        return
    found = partition(models, 3, limits=limits, time_limit_s=30)
    assert found.objective == pytest.approx(best, abs=2e-3)
    assert found.lower_bound <= found.objective + 1e-9
    chosen = [found.assignment[m.name] for m in models]
    assert found.objective == pytest.approx(deviations(models, chosen, 3, limits.memory_weight))


def test_equal_models_are_split_evenly() -> None:
    found = partition([model(f"m{i}") for i in range(6)], 3)
    assert [len(members(found, k)) for k in range(3)] == [2, 2, 2]
    assert imbalances(found) == (0.0, 0.0)


def test_weights_add_up_and_working_memory_counts_once() -> None:
    four = [model(f"m{i}", memory=100.0, dynamic=300.0) for i in range(4)]
    found = partition(four, 1, limits=PartitionLimits(memory_mib=700.0))
    assert members(found, 0) == four
    with pytest.raises(InvalidInputError):
        partition(four, 1, limits=PartitionLimits(memory_mib=699.0))


def test_limits_hold() -> None:
    models = [model(f"m{i}", rate=100.0 * (i + 1)) for i in range(6)]
    found = partition(models, 3, limits=PartitionLimits(memory_mib=250.0, max_rate_rps=750.0, max_models=2))
    for k in range(3):
        assert sum(m.static_mib for m in members(found, k)) <= 250.0
        assert sum(m.rate_rps for m in members(found, k)) <= 750.0
        assert len(members(found, k)) <= 2


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_fractions_of_a_mib_count(seed: int) -> None:
    """Nothing lies above the limit, and what fits nowhere is what the sums of the others leave no room for."""
    rng = random.Random(seed)
    models = [model(f"m{i}", rng.uniform(1, 9), rng.uniform(0.1, 2.9), rng.uniform(0, 0.9)) for i in range(60)]
    limits = PartitionLimits(memory_mib=6.5)
    groups: dict[int | None, list[PartitionModel]] = {}
    for one, k in zip(models, fits_some(models, 12, limits), strict=True):
        groups.setdefault(k, []).append(one)

    def held(group: list[PartitionModel]) -> float:
        return sum(m.static_mib for m in group) + max(m.dynamic_mib for m in group)

    left = groups.pop(None, [])
    assert left
    assert all(held(group) <= 6.5 * (1 + 1e-9) for group in groups.values())
    assert not any(held([*group, one]) <= 6.5 for group in groups.values() for one in left)


def test_change_is_bounded_loading_and_unloading_both_counted() -> None:
    models = [model("a"), model("b"), model("c"), model("d")]
    even, lopsided = {"a": 0, "b": 0, "c": 1, "d": 1}, {"a": 0, "b": 0, "c": 0, "d": 1}
    assert partition(models, 2, current=even).moved == ()
    moved = partition(models, 2, current=lopsided)
    assert (len(moved.moved), moved.changed_mib) == (1, 200.0)
    assert partition(models, 2, current=lopsided, limits=PartitionLimits(max_change_mib=200.0)).moved == moved.moved
    assert partition(models, 2, current=lopsided, limits=PartitionLimits(max_change_mib=199.0)).moved == ()


def test_a_new_model_is_only_loaded_and_names_are_kept() -> None:
    models = [model("a", 100.0), model("b", 200.0), model("new", 100.0)]
    found = partition(models, 2, current={"a": 1, "b": 0}, limits=PartitionLimits(memory_weight=0.0))
    assert dict(found.assignment) == {"a": 1, "b": 0, "new": 1}
    assert (found.moved, found.changed_mib) == ((), 100.0)


def test_a_sub_cluster_gets_the_gpus_it_keeps_busy() -> None:
    assert gpus_by_need([13.0, *[4.0] * 20], 100)[0] >= 13
    assert gpus_by_need([9.0, 0.5], 10) == [9, 1]
    assert gpus_by_need([1.0, 1.0, 1.0], 3) == [1, 1, 1]


def evaluated(seed: int) -> list[PartitionModel]:
    """Return 800 models as in the paper's evaluation: variants of a zoo, exponential rates."""
    rng = random.Random(seed)
    zoo = [(rng.uniform(10, 500), rng.uniform(50, 400)) for _ in range(35)]
    return [model(f"m{i}", rng.expovariate(1 / 100.0), zoo[i % 35][0], zoo[i % 35][1]) for i in range(800)]


def imbalances(found: Partition) -> tuple[float, float]:
    """Return (most - least) / mean of the sub-clusters' rates and static memory."""
    rates, memory = [m.rate_rps for m in found.models], [m.static_mib for m in found.models]
    return _imbalance(found, rates), _imbalance(found, memory)


def _imbalance(found: Partition, values: list[float]) -> float:
    sums = dict.fromkeys(found.assignment.values(), 0.0)
    for each, value in zip(found.models, values, strict=True):
        sums[found.assignment[each.name]] += value
    return (max(sums.values()) - min(sums.values())) * len(sums) / sum(sums.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_hundred_models_in_twenty_sub_clusters(seed: int) -> None:
    models, limits = evaluated(seed), PartitionLimits(memory_mib=16_000.0)
    found = partition(models, 20, limits=limits)
    rate, memory = imbalances(found)
    assert rate < 0.005
    assert memory < 0.005
    rng = random.Random(seed)
    shuffled = {m.name: k % 20 for k, m in enumerate(rng.sample(models, 800))}
    random_one = Partition(shuffled, 20, 0.0, 0.0, (), 0.0, False, tuple(models))
    assert imbalances(random_one)[0] > 20 * rate
    one_pass = [k for k in fits_some(models, 20, limits) if k is not None]
    assert len(one_pass) == len(models)
    assert found.objective <= deviations(models, one_pass, 20, 1.0) + 1e-9
