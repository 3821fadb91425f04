"""Policy `muxserve`: the published search on the plan's schema, with what it believes beside what is promised."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import node_of
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.generation import muxserve
from tenuto_lab.generation.muxserve_policy import MuxServe, ProfileTimes

PROFILES = Profiles([load_shipped("muxserve-a100")])
RATES = {"llama-65b": 0.5, "llama-30b": 1.5, "llama-13b": 4.0, "llama-7b": 6.0, "llama-7b ": 0.5}


def specs(**more: Any) -> tuple[ModelSpec, ...]:
    found = []
    for index, (row, rate) in enumerate(RATES.items()):
        given = {
            "name": f"llm-{index}",
            "profile": row.strip(),
            "rate_rps": rate,
            "slo": {"ttft_ms": 3000, "tpot_ms": 200},
            "generates": {"prompt_tokens": 161, "output_tokens": 337},
        }
        found.append(ModelSpec.model_validate(given | more))
    return tuple(found)


def cluster(nodes: int = 1, each: int = 8) -> Cluster:
    given = [{"name": f"n{i}", "gpus": [{"type": "a100-80gb", "count": each}]} for i in range(nodes)]
    return Cluster.model_validate({"nodes": given})


def planned(models: tuple[ModelSpec, ...], on: Cluster) -> Plan:
    return solve(load_policy("muxserve"), Workload(models=models), on, PROFILES)


def test_the_units_of_the_published_search_become_gpulets_on_gpus_of_one_node() -> None:
    plan = planned(specs(), cluster(2, 4))
    assert not plan.unserved
    units: dict[tuple[str, ...], list[str]] = {}
    for gpulet in plan.gpulets:
        assert len({node_of(gpu) for gpu in gpulet.gpus}) == 1
        units.setdefault(gpulet.gpus, []).append(gpulet.models[0].name)
    taken = [gpu for unit in units for gpu in unit]
    assert len(taken) == len(set(taken))
    models = []
    for spec in specs():
        row = PROFILES.get(spec.profile_row, "a100-80gb")
        assert row.generation is not None
        assert row.weights_mib is not None
        kv_mib = (row.generation.kv_bytes_per_token or 0.0) / 2**20
        scale = row.weights_mib / (PROFILES.get("llama-7b", "a100-80gb").weights_mib or 1.0)
        times = {count: ProfileTimes(row.generation, count) for count in (1, 2, 4, 8) if has(spec, count)}
        models.append(muxserve.LanguageModel(spec.name, spec.rate_rps, 161, 337, row.weights_mib, kv_mib, scale, times))
    meshes = muxserve.place(models, 2, 4)
    found = sorted((len(gpus), sorted(names)) for gpus, names in units.items())
    assert found == sorted((mesh.gpus, sorted(model.name for model, _ in mesh.models)) for mesh in meshes)
    assert plan.believed is not None
    total = sum(muxserve.throughput_rps(mesh) for mesh in meshes)
    assert plan.believed.goodput_rps == pytest.approx(total, abs=1e-3)


def has(spec: ModelSpec, count: int) -> bool:
    generation = PROFILES.get(spec.profile_row, "a100-80gb").generation
    return generation is not None and any(at.tensor_parallel == count for at in generation.steps)


def test_memory_and_what_cannot_be_said_stand_in_the_plan() -> None:
    plan = planned(specs(), cluster())
    for there in plan.by_gpu().values():
        assert sum(gpulet.memory_mib or 0.0 for gpulet in there) <= 81_920 + 1
        assert sum(gpulet.effective_share_pct for gpulet in there) <= 120 + 1e-6
    assert any("prefills with shares of their own" in note for note in plan.notes)
    assert plan.overcommits == any("exceed some GPUs" in note for note in plan.notes)
    assert Plan.model_validate(plan.model_dump(mode="json", by_alias=True)) == plan
    ran = Simulation.of_plan(plan, duration_s=30.0, seed=1).run().summary()
    assert ran["attainment"] > 0.5


@pytest.mark.parametrize(
    ("models", "on", "message"),
    [
        (specs(), cluster(1, 3), "nodes that all have 1, 2, 4 or 8 GPUs"),
        (
            (*specs(), ModelSpec(name="net", latency={"alpha_ms": 1, "beta_ms": 1}, rate_rps=1, slo_ms=9)),
            cluster(),
            "plans only models that generate",
        ),
    ],
)
def test_what_it_does_not_plan_is_refused_with_the_cure(
    models: tuple[ModelSpec, ...], on: Cluster, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        planned(models, on)


def test_models_of_fixed_cost_alone_are_refused() -> None:
    net = ModelSpec(name="net", latency={"alpha_ms": 1, "beta_ms": 1}, rate_rps=1, slo_ms=9)
    with pytest.raises(InvalidInputError, match="plans only models that generate"):
        solve(MuxServe(), Workload(models=(net,)), Cluster.parse("a100-80gb:1"), PROFILES)


def test_models_that_fit_nowhere_are_unserved_with_the_reason() -> None:
    plan = planned(specs(), cluster(1, 1))
    assert len(plan.unserved) == len(RATES)
    assert "do not all fit" in plan.unserved_reasons["llm-0"]
