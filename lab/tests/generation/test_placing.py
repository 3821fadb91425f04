"""MuxServe's placement of language models and policy `tenuto`'s: what fits, and how runs are scored."""

from __future__ import annotations

import itertools

import pytest

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.placement.generation_capacity import carried
from tenuto_lab.generation import muxserve
from tenuto_lab.generation.muxserve import LanguageModel, Mesh, candidate, throughput_rps
from tenuto_lab.generation.muxserve_experiment import Experiment, mean_of
from tenuto_lab.generation.step_times import Curve, StepTimes

STEPS = StepTimes(
    prefill=Curve(((32, 12.0, 2.0), (128, 16.0, 6.0), (131072, 9600.0, 6500.0))),
    decode=Curve(((1, 11.0, 2.0), (64, 13.0, 2.5), (2048, 180.0, 150.0)), (0.0003, 0.0001)),
)


def language_model(name: str, rate_rps: float, weights_gib: float = 13.0) -> LanguageModel:
    times = {1: STEPS, 2: STEPS, 4: STEPS}
    return LanguageModel(name, rate_rps, 100.0, 250.0, weights_gib * 1024, 0.5, weights_gib / 13, times)


def test_a_higher_rate_asks_for_a_larger_share_or_batch() -> None:
    needs = [candidate(language_model("a", rate), 1) for rate in (0.5, 5.0, 15.0)]
    assert all(found is not None for found in needs)
    sizes = [(found.share, found.batch) for found in needs if found is not None]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_weights_beyond_the_memory_have_no_candidate() -> None:
    assert candidate(language_model("a", 1.0, weights_gib=90.0), 1) is None
    assert candidate(language_model("a", 1.0, weights_gib=90.0), 2) is not None


def test_a_unit_serves_at_most_the_rates_and_less_with_a_neighbour() -> None:
    lone = Mesh(1, ((language_model("a", 50.0), 60.0),))
    both = lone.with_model(language_model("b", 50.0), 60.0)
    assert throughput_rps(lone) < 50.0
    assert throughput_rps(lone) < throughput_rps(both) < 2 * throughput_rps(lone)
    small = Mesh(1, ((language_model("a", 1.0), 60.0),))
    assert throughput_rps(small) == pytest.approx(1.0)


def test_muxserve_places_every_model_once_within_memory_and_shares() -> None:
    models = [language_model(f"m{i}", rate) for i, rate in enumerate((12.0, 6.0, 2.0, 1.0, 0.5))]
    units = muxserve.place(models, 1, 4)
    assert sorted(model.name for unit in units for model, _ in unit.models) == [m.name for m in models]
    assert sum(unit.gpus for unit in units) <= 4
    assert all(unit.is_possible() for unit in units)
    with pytest.raises(ValueError, match="MuxServe cuts nodes of 1, 2, 4, 8"):
        muxserve.place(models, 1, 3)


def test_the_experiment_scores_three_placements_of_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenutoPolicy, "carries", lambda _policy, *asked: carried(*asked))  # trials take 8 s
    sizes = {f"llm-{i}": "llama-7b" if i % 4 else "llama-65b" for i in (3, 4, 5, 6)}
    rows = [
        [size, gpus, share, batch, tokens, STEPS.prefill_ms(batch * tokens, share), STEPS.decode_ms(batch, 0, share)]
        for size, gpus, share, batch, tokens in itertools.product(
            ("llama-7b", "llama-65b"), (1, 2, 4, 8), (30, 60, 100), (1, 32, 64, 128, 512), (32, 512)
        )
        if size == "llama-7b" or gpus >= 4
    ]
    workload = {"rates_rps": dict.fromkeys(sizes, 1.0), "avg_prompt_tokens": 100.0, "avg_output_tokens": 200.0}
    experiment = Experiment(
        {"models": sizes, "workloads": {"8": workload}, "reached": {"throughput_rps": {"8": [1, 1]}}, "rows": rows}
    )
    requests = experiment.requests(8, seed=3)[::24]
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in experiment.requests(8, seed=3)[::24]]
    experiment.served_by_meshes(experiment.muxserve_units(8), requests)
    muxed = experiment.score(8, requests)
    plan = experiment.gpulet_plan(8)
    assert not plan.unserved
    again = experiment.requests(8, seed=3)[::24]
    experiment.served_by_gpulets(plan, again)
    own = experiment.score(8, again)
    assert 0.0 < muxed.attainment <= 1.0
    assert own.attainment > 0.9
    assert mean_of([own, own]) == own
    with pytest.raises(ValueError, match="never served"):
        experiment.score(8, experiment.requests(8, seed=3))
