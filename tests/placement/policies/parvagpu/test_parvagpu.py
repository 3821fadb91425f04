"""ParvaGPU: the answers that its authors published, and what it cannot do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tenuto.documents import load_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import instance_type_of
from tenuto.profiles.shipped import load_shipped

PROFILES = Profiles([load_shipped("parvagpu-a100")])
PUBLISHED: dict[str, Any] = load_document(Path(__file__).parents[3] / "data" / "parvagpu.yaml")
ELASTIC = Cluster.parse("a100-80gb:1:mig", elastic=True)


def workload_of(scenario: str) -> Workload:
    models = PUBLISHED[scenario]["models"].items()
    return Workload(models=tuple(ModelSpec(name=name, rate_rps=rate, slo_ms=slo) for name, (rate, slo) in models))


def segments(plan: Plan) -> Counter[tuple[str, int, int, int]]:
    """Return how often each segment is there: model, GPCs, batch size and processes."""
    types = {gpu.id: instance_type_of(gpu.type) for gpu in plan.gpus}
    alike = Counter((g.gpu, g.models[0].name, g.models[0].batch_size) for g in plan.gpulets)
    found: Counter[tuple[str, int, int, int]] = Counter()
    for (place, model, batch), processes in alike.items():
        mig = types[place]
        assert mig is not None
        found[model, mig.gpcs, batch, processes] += 1
    return found


@pytest.mark.parametrize("scenario", ["s1", "s2", "s4", "s6"])
def test_gpus_and_segments_are_those_published(scenario: str) -> None:
    plan = solve(load_policy("parvagpu", {}), workload_of(scenario), ELASTIC, PROFILES)
    published = {(m, gpcs, batch, processes): n for m, gpcs, batch, processes, n in PUBLISHED[scenario]["segments"]}
    assert plan.expected.gpus_used == PUBLISHED[scenario]["gpus"]
    assert segments(plan) == published


def test_what_is_expected_of_a_batch_is_what_was_measured_of_so_many_processes() -> None:
    plan = solve(load_policy("parvagpu", {}), workload_of("s1"), ELASTIC, PROFILES)
    (first, *others) = plan.hosts_of("densenet121")
    measured = PROFILES.get("densenet121", "a100-80gb-2g.20gb").point(first.models[0].batch_size)
    assert first.models[0].latency_ms == pytest.approx(measured.processes_ms[1 + len(others)])


def test_on_too_few_gpus_the_smallest_segments_are_left_out() -> None:
    plan = solve(load_policy("parvagpu", {}), workload_of("s4"), Cluster.parse("a100-80gb:5:mig"), PROFILES)
    assert plan.expected.gpus_used == 5
    assert plan.unserved_reasons
    whole = solve(load_policy("parvagpu", {}), workload_of("s4"), ELASTIC, PROFILES)
    assert segments(plan).total() < segments(whole).total()


def test_a_model_that_no_instance_serves_in_time_is_named() -> None:
    slow = Workload(models=(ModelSpec(name="vgg19", rate_rps=10, slo_ms=3.9),))
    plan = solve(load_policy("parvagpu", {}), slow, ELASTIC, PROFILES)
    assert "0.45 of its SLO" in plan.unserved_reasons["vgg19"]


def test_gpus_that_it_may_not_cut_are_refused_with_the_cure() -> None:
    with pytest.raises(InvalidInputError, match="mig: managed"):
        solve(load_policy("parvagpu", {}), workload_of("s1"), Cluster.parse("a100-80gb:4"), PROFILES)
