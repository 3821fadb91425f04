"""Applications in trials: their answers are judged, not their stages, and splits of their deadlines are candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Judged, Worth
from tenuto.batching.planning.losses import LossTrials
from tenuto.batching.planning.plan_search import PlanSearch, SearchOptions
from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.batching.planning.trial import Trials
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, solve
from tenuto.placement.deadline_split import candidate_splits
from tenuto.placement.planner import PlanTask, make_plan
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tests.instruments.fan_out import FAST, workload

NONE = Profiles(())
GPU = Cluster.parse("v100:1")
FUNCTION = "tests.instruments.fan_out:crops"


def ocr(**changes: Any) -> dict[str, Any]:
    """A detector, its crops (two in the mean), and one request to a model that others ask, too."""
    stages = [
        {"model": "detect", "latency": FAST},
        {"model": "read", "after": ["detect"], "latency": FAST, "map": FUNCTION, "count": 2, "most": 9},
        {"model": "join", "after": ["read"]},
    ]
    return {"name": "ocr", "rate_rps": 40.0, "slo_ms": 150.0, "stages": stages, **changes}


def work_of(rate_rps: float = 40.0, alone_rps: float = 30.0) -> Workload:
    join = {"name": "join", "latency": FAST, "rate_rps": alone_rps, "slo_ms": 100.0}
    return workload(ocr(rate_rps=rate_rps), models=[join])


def trials(work: Workload, seed: int = 0) -> Trials:
    given: dict[str, Any] = {"requests": 6_000, "scheduler": "deferred", "network": NetworkDelay()}
    return Trials(work.models, seed=seed, applications=work.applications, **given)


@pytest.mark.parametrize("rate_rps", [40.0, 300.0])
def test_a_trial_says_of_an_application_what_a_run_of_its_plan_does(rate_rps: float) -> None:
    work = work_of(rate_rps)
    plan = solve(Symphony(), work, GPU, NONE)
    judged = trials(work).run(plan)
    assert judged.offered_rps == pytest.approx([30.0, rate_rps], rel=0.2)
    alone, calls = judged.attainment

    run = Simulation.of_plan(plan, duration_s=60.0).run()
    own = run.result.outcome[run.load.owner < 0]
    assert alone == pytest.approx(np.mean(own == Outcome.OK), abs=0.03)
    assert calls == pytest.approx(np.mean(run.joins.outcome == Outcome.OK), abs=0.03)
    assert (calls > 0.99) == (rate_rps == 40.0)


def test_without_a_host_of_a_stage_only_what_does_not_need_it_is_served() -> None:
    work = work_of()
    plan = solve(Symphony(), work, GPU, NONE)
    left = [r for gpulet in plan.gpulets for r in gpulet.models if r.name != "ocr.read"]
    gpulet = plan.gpulets[0].model_copy(update={"models": tuple(left)})
    judged = trials(work).run(plan.model_copy(update={"gpulets": (gpulet,)}))
    assert judged.attainment[1] == pytest.approx(np.exp(-2.0), abs=0.05)  # the function made no request
    assert judged.attainment[0] > 0.9
    assert trials(work).run(plan.model_copy(update={"gpulets": (gpulet,)}), attainment=0.99).value == -1.0


@pytest.mark.parametrize("rate_rps", [1e-4, 0.01, 0.3])
def test_an_application_of_which_a_trial_may_see_no_request_is_planned(rate_rps: float) -> None:
    work = work_of(rate_rps, alone_rps=500.0)
    plan = solve(TenutoPolicy(requests=2_000), work, GPU, NONE)
    assert plan.expected.goodput_rps > 0.95 * 500.0
    judged = trials(work).run(plan)
    assert judged.ok_rps[0] == pytest.approx(judged.offered_rps[0], rel=0.05)


def test_parts_of_what_clients_ask_are_parts_of_what_models_are_asked() -> None:
    work = work_of()
    worth = Worth(work.models, "total", work.applications)
    assert [spec.name for spec in worth.targets] == ["join", "ocr"]
    assert worth.most == 70.0
    assert worth.parts_of_targets({"join": 0.5, "ocr.detect": 1.0, "ocr.read": 0.4}) == [0.5, 0.4]
    parts = {"join": (30.0 * 1.0 + 40.0 * 0.5) / 70.0, "ocr.detect": 0.5, "ocr.read": 0.5}
    assert worth.parts_of_models([1.0, 0.5]) == pytest.approx(parts)
    partly = Worth(work.models[:1], "total", work.applications)
    assert (partly.applications, partly.targets) == ((), work.models[:1])


def test_splits_are_candidates_of_one_search_and_the_plan_has_the_one_that_is_taken() -> None:
    work = work_of(rate_rps=150.0)
    splits = list(candidate_splits(work, GPU, NONE))
    assert len(splits) > 1
    search = PlanSearch(SearchOptions(starts=("symphony",)), work, GPU, NONE)
    groups = list(search.candidates.by_split(GPU))
    assert [[each.plan.applications for each in group] for group in groups] == [[s.applications] for s in splits]
    assert [len(group) for group in search.candidates.by_split(GPU)] == [len(group) for group in groups]

    plan = make_plan(PlanTask(TenutoPolicy(starts=("symphony",), requests=1_000), work, GPU, NONE))
    (taken,) = (split for split in splits if split.applications == plan.applications)
    assert plan.models == taken.models
    assert Plan.from_data(plan.to_data()) == plan
    again = solve(TenutoPolicy(starts=("symphony",), requests=1_000), plan.workload, GPU, NONE)
    assert again.applications == plan.applications


def test_what_a_plan_promises_of_stages_is_what_its_applications_were_served() -> None:
    plan = solve(TenutoPolicy(starts=("symphony",), requests=2_000), work_of(rate_rps=300.0), GPU, NONE)
    goodput = {spec.name: plan.expected.models[spec.name].goodput_rps / spec.rate_rps for spec in plan.models}
    assert goodput["ocr.detect"] == pytest.approx(goodput["ocr.read"])
    assert 0.2 < goodput["ocr.detect"] < 0.99
    assert goodput["join"] > goodput["ocr.detect"]


def test_losses_are_tried_with_whole_applications() -> None:
    plan = solve(Symphony(), work_of(rate_rps=300.0), GPU, NONE)
    parts = LossTrials()(plan)
    assert parts is not None
    assert parts["ocr.detect"] == parts["ocr.read"] < 0.99


@pytest.mark.parametrize(("others_keep", "gpus"), [(0.98, 1), (0.9, 2)])
def test_where_one_gpu_less_is_nearly_enough_a_stage_has_less_of_the_deadline(others_keep: float, gpus: int) -> None:
    work, elastic = work_of(rate_rps=150.0), Cluster.parse("v100:1", elastic=True)
    likeliest_ms = next(candidate_splits(work, elastic, NONE))["ocr.detect"].slo_ms

    class WrittenTrials:
        def __init__(self, models: tuple[ModelSpec, ...], **given: Any) -> None:
            self._worth = Worth(models, given["objective"], given["applications"])

        def run(self, plan: Plan, *, floor: float = 0.0, attainment: float = 0.0) -> Judged:
            offered = np.array([spec.rate_rps for spec in self._worth.targets])
            is_short = plan.model("ocr.detect").slo_ms < 0.7 * likeliest_ms
            part = 1.0 if len(plan.used_gpus) > 1 else 0.997 if is_short else others_keep
            is_ended = part < max(attainment, floor / self._worth.most)
            return Judged(1e4, offered, part * offered, np.array([0.5]), -1.0 if is_ended else part)

    search = PlanSearch(SearchOptions(starts=("symphony",)), work, elastic, NONE, trials=WrittenTrials)
    best = search.best()
    assert best is not None
    assert len(best.plan.used_gpus) == gpus
