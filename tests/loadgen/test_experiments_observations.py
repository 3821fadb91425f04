"""The published observations on the simulated experiments, each with its tolerance; the ones that do not come out are
asserted as such, with the reason the page gives.
"""

from __future__ import annotations

import pytest

from tenuto.experiments.case import DEFERRED, ROUTER, Case, run_case
from tenuto.experiments.checks import hosted
from tenuto.experiments.experiment import THESIS_POLICIES, Observation, Results, Settings
from tenuto.experiments.registry import find_experiments

pytestmark = pytest.mark.unit


def run(name: str) -> tuple[Results, dict[str, Observation]]:
    """Run an experiment's quick points under the thesis' policies, as `--quick` does, and check its observations."""
    (experiment,) = find_experiments((name,))
    cases: list[Case] = experiment.cases(Settings(policies=THESIS_POLICIES, quick=True))
    results = Results([run_case(case) for case in cases])
    return results, {seen.name: seen for seen in experiment.check(results)}


Ran = tuple[Results, dict[str, Observation]]


@pytest.fixture(scope="module")
def vision() -> Ran:
    return run("6.1")


@pytest.fixture(scope="module")
def language() -> Ran:
    return run("6.10")


@pytest.fixture(scope="module")
def rates() -> Ran:
    return run("6.15")


def test_usher_on_six_gpus_beats_ao_milp_by_batch_8_against_64(vision: Ran) -> None:
    """At equal promised and served throughput (3 %), batch 64 costs at least a quarter of efficientnet_b7's goodput."""
    results, seen = vision
    usher = results.run("usher", 6, 200)
    milp = results.run("ao-milp (published plan)", 6, 200)
    assert usher is not None
    assert milp is not None
    left, right = usher["models"]["efficientnet_b7"], milp["models"]["efficientnet_b7"]
    assert right["throughput_rps"] == pytest.approx(left["throughput_rps"], rel=0.03)
    assert right["goodput_rps"] <= 0.75 * left["goodput_rps"]
    assert milp["goodput_rps"] < usher["goodput_rps"]
    assert seen["usher-beats-ao-milp"].status == "reproduced"


def test_our_ao_milp_prefers_batch_8_so_that_it_equals_usher(vision: Ran) -> None:
    results, seen = vision
    assert seen["ao-milp-batch"].status == "not reproduced"
    assert "solver" in seen["ao-milp-batch"].why
    assert results.goodput("ao-milp", 6, 200) == pytest.approx(results.goodput("usher", 6, 200), rel=0.01)


def test_deferred_batching_takes_nothing_from_batch_64(vision: Ran) -> None:
    results, _ = vision
    router = results.goodput("ao-milp (published plan)", 6, 200, ROUTER)
    deferred = results.goodput("ao-milp (published plan)", 6, 200, DEFERRED)
    sent = results.run("ao-milp (published plan)", 6, 200)
    assert router is not None
    assert deferred is not None
    assert sent is not None
    assert deferred >= 0.99 * sent["offered_rps"] > router


def test_usher_jumps_from_three_to_four_gpus(vision: Ran) -> None:
    """At least a quarter more, after at most 10 % from two to three."""
    results, seen = vision
    two, three, four = (results.goodput("usher", gpus, 200) or 0.0 for gpus in (2, 3, 4))
    assert four >= 1.25 * three
    assert 0.98 * two <= three <= 1.1 * two
    assert seen["usher-plans"].status == seen["usher-jump"].status == seen["usher-marginal"].status == "reproduced"


def test_wao_usher_is_flat_in_gpus(vision: Ran) -> None:
    """Within 2 % from three to six GPUs, of which it uses three."""
    results, seen = vision
    values = [results.goodput("wao-usher", gpus, 200) or 0.0 for gpus in (3, 4, 5, 6)]
    assert max(values) <= 1.02 * min(values)
    assert seen["wao-usher-flat"].status == "reproduced"
    assert seen["wao-usher-resnet50"].status == "reproduced"
    assert seen["wao-usher-gpu0"].status == "not reproduced"
    assert "equal goodput" in seen["wao-usher-gpu0"].why


def test_wsm_milp_on_five_gpus_is_close_to_usher_on_six_but_not_on_four(vision: Ran) -> None:
    """Within 10 %; resnet50 beside alexnet takes 8 ms within 5 %."""
    _, seen = vision
    assert seen["wsm-milp-resnet50"].status == "reproduced"
    assert seen["wsm-milp-5"].status == "reproduced"
    assert seen["wsm-milp-4"].status == "not reproduced"
    assert "time slices" in seen["wsm-milp-4"].why


def test_ao_milp_is_better_on_few_gpus_and_usher_on_six_is_best(vision: Ran) -> None:
    _, seen = vision
    assert seen["ao-milp-small"].status == "reproduced"
    assert seen["ranking"].status == "reproduced"


def test_shares_of_load_are_9_and_5_of_24(vision: Ran) -> None:
    """Each within half a percentage point."""
    results, seen = vision
    replicas = results.run("igniter (published plan)", 5, 200)
    assert replicas is not None
    shares = [row["load_share"] for row in replicas["models"]["efficientnet_b7"]["replicas"]]
    assert shares == pytest.approx([9 / 24, 5 / 24, 5 / 24, 5 / 24], abs=0.005)
    assert seen["igniter-load-shares"].status == "reproduced"


def test_wsm_milp_drops_at_4000_and_recovers_at_5000(rates: Ran) -> None:
    """At least 5 % down and 5 % up; vgg19 at batch 128 is the cause of the drop."""
    results, seen = rates
    low, middle, high = (results.goodput("wsm-milp", total, 250) or 0.0 for total in (3000, 4000, 5000))
    assert middle <= 0.95 * low
    assert high >= 1.05 * middle
    plan = results.row("wsm-milp", 4000, 250)
    assert ("vgg19", 128) in [pair for gpu in hosted(plan).values() for pair in gpu]
    assert [seen[name].status for name in ("wsm-milp-plans", "wsm-milp-drop", "wsm-milp-recovery")] == [
        "reproduced"
    ] * 3
    assert "alexnet's, not those of resnet50" in seen["wsm-milp-recovery"].ours  # it recovers for another reason


def test_densenet121_at_target_64_leaves_by_timeout_at_600_and_fills_at_1000(rates: Ran) -> None:
    """Fewer than a quarter of the batches full against more than nine of ten."""
    results, seen = rates
    low = results.run("ao-milp (published plan)", 3000, 250)
    high = results.run("ao-milp", 5000, 250)
    assert low is not None
    assert high is not None
    slow, fast = (r["models"]["densenet121"]["replicas"][0] for r in (low, high))
    assert slow["batch_size"] == fast["batch_size"] == 64
    assert slow["full_share"] < 0.25
    assert fast["full_share"] > 0.9
    assert seen["densenet121-timeout"].status == seen["densenet121-fills"].status == "reproduced"
    assert seen["densenet121-batch"].status == "not reproduced"


def test_language_models_come_out_as_planned_but_bert_is_faster_on_its_share(language: Ran) -> None:
    _, seen = language
    reproduced = {"wsm-milp-5", "wsm-milp-6", "wsm-milp-7", "wsm-milp-optimal", "usher-gpt2", "wao-usher-plan"}
    assert {name for name, one in seen.items() if one.status == "reproduced"} == reproduced
    rest = {name: one.status for name, one in seen.items() if name not in reproduced}
    assert rest == {
        "wao-usher-bert": "not reproduced", "wao-usher-bert-rate": "not reproduced",
        "igniter-six": "not reproduced", "igniter-flat": "not checked",
    }  # fmt: skip
    assert "107 ms" in seen["wao-usher-bert"].why


def test_igniter_with_derived_coefficients_needs_one_gpu_less_than_published(vision: Ran) -> None:
    """Its GPUs and its batches do not come out; the pages say that coefficients are derived, and why."""
    results, seen = vision
    row = results.row("igniter", 5, 200)
    assert row is not None
    assert row["profile"] == "thesis-v100-derived"
    assert row["gpus_needed"] == 4
    for name in ("igniter-gpus", "igniter-gpu0", "igniter-gpu1", "igniter-batches"):
        assert seen[name].status == "not reproduced"
    assert "derived" in seen["igniter-gpus"].why
    assert "50 requests" in seen["igniter-batches"].why


def test_igniter_needs_two_and_three_gpus_at_1000_and_2000_as_published() -> None:
    """Exactly; above, ours needs fewer than the eight the thesis prints."""
    (experiment,) = find_experiments(("6.15",))
    cases = [c for c in experiment.cases(Settings(policies=("igniter",), duration_s=0.5)) if c.slo_ms == 350.0]
    seen = {one.name: one for one in experiment.check(Results([run_case(case, (ROUTER,)) for case in cases]))}
    found = {name.rpartition("-")[2]: one for name, one in seen.items() if name.startswith("igniter-gpus")}
    assert [(one.published, one.ours, one.status) for one in found.values()] == [
        ("2 GPUs", "2 GPUs", "reproduced"), ("3 GPUs", "3 GPUs", "reproduced"), ("8 GPUs", "5 GPUs", "not reproduced"),
        ("8 GPUs", "7 GPUs", "not reproduced"), ("8 GPUs", "7 GPUs", "not reproduced"),
    ]  # fmt: skip


def test_igniter_gains_nothing_from_the_fourth_gpu_under_the_thesis_router() -> None:
    """Within 2 %; with deferred batching the same plans would gain."""
    (experiment,) = find_experiments(("6.10",))
    cases = [c for c in experiment.cases(Settings(policies=("igniter",))) if c.gpus in (3, 4)]
    results = Results([run_case(case) for case in cases])
    seen = {one.name: one for one in experiment.check(results)}
    assert seen["igniter-flat"].status == "reproduced"
    three, four = (results.goodput("igniter", gpus, 300, DEFERRED) or 0.0 for gpus in (3, 4))
    assert four > 1.1 * three


def test_points_left_out_are_not_judged() -> None:
    for name in ("6.1", "6.10", "6.15"):
        (experiment,) = find_experiments((name,))
        assert {seen.status for seen in experiment.check(Results([]))} == {"not checked"}
