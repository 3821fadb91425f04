"""Running experiments: the emulated costs of sharing, the clients, the runner, the files and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.errors import InvalidInputError
from tenuto.placement import Replica
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.experiments import runner
from tenuto_lab.experiments.case import Case, plan_case, run_case
from tenuto_lab.experiments.derived import DERIVED_FOR, derivation
from tenuto_lab.experiments.emulation import Emulation, emulated_plan
from tenuto_lab.experiments.experiment import Settings
from tenuto_lab.experiments.facts import client_share, data_ms_by_model, network_of, thesis_facts
from tenuto_lab.experiments.registry import EXPERIMENTS, find_experiments
from tenuto_lab.experiments.running_tuner import FIGURES
from tenuto_lab.experiments.sweeps import divided
from tenuto_lab.verbs.experiment import command

pytestmark = pytest.mark.unit
REFERENCE = Path(__file__).parents[3] / "tests" / "data"
FIVE_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")


def case(policy: str = "usher", gpus: int = 3, **changes: Any) -> Case:
    """Return a short case of section 6.2.1."""
    values: dict[str, Any] = {
        "policy": policy,
        "models": FIVE_MODELS,
        "rates_rps": (500.0,) * 5,
        "slo_ms": 200.0,
        "gpus": gpus,
        "x": gpus,
        "sent_share": 0.86668,
        "duration_s": 1.0,
        "seed": 0,
    }
    return Case(**{**values, **changes})


def test_shipped_facts_are_those_of_the_tests() -> None:
    assert thesis_facts() == json.loads((REFERENCE / "thesis_experiments.json").read_text(encoding="utf-8"))


def test_clients_reach_what_the_thesis_prints() -> None:
    assert client_share("6.2.1", 2500.0) * 500.0 == pytest.approx(433.34)
    assert client_share("6.3", 4 * 400.0) == pytest.approx(368 / 400)
    assert client_share("6.3", 4 * 1600.0) == pytest.approx(1294 / 1600, abs=0.001)
    assert client_share("6.3", 100.0) == pytest.approx(368 / 400)  # below the table: its first row


def test_the_network_takes_8_7_ms_for_16_images() -> None:
    network = network_of(FIVE_MODELS)
    assert network.ctrl_ms + 16 * network.data_ms_per_request == pytest.approx(8.7)
    image, tokens = data_ms_by_model(["resnet50", "bert"])
    assert image == network.data_ms_per_request
    assert tokens == pytest.approx(image * 8192 / 602112)


def test_neighbours_with_shares_cost_what_the_nearest_measured_pair_shows() -> None:
    plan = plan_case(case("wao-usher"))
    emulation = Emulation(load_shipped("thesis-v100"))
    emulated = emulated_plan(plan, emulation)
    resnet50 = next(r for g in emulated.gpulets for r in g.models if r.name == "resnet50")
    assert "resnet50 beside vgg19: the nearest measured pair" in emulation.notes
    unmeasured = "densenet121 beside efficientnet_b7: mean of all measured pairs"
    assert any(note.startswith(unmeasured) for note in emulation.notes)
    assert 1.1 < resnet50.slowdown < 1.35


def test_a_limited_share_costs_more_than_none_and_less_than_its_inverse_squared() -> None:
    emulation = Emulation(load_shipped("thesis-v100"))
    assert emulation.share_factor("resnet50", 4, 100.0) == 1.0
    assert 2.5 < emulation.share_factor("resnet50", 4, 17.55) < 4.5  # measured, TensorRT
    busy = 0.9682
    assert emulation.share_factor("bert", 4, 31.83) == pytest.approx(busy / 0.3183 + 1 - busy)
    assert emulation.share_factor("bert", 4, 5.0) > emulation.share_factor("bert", 4, 10.0)


def test_neighbours_without_shares_take_turns() -> None:
    plan = emulated_plan(plan_case(case("wsm-milp", 5)), Emulation(load_shipped("thesis-v100")))
    together = [g for g in plan.gpulets if len(plan.on_gpu(g.gpu)) == 2]
    assert {r.slowdown for g in together for r in g.models} == {2.0}
    assert {r.slowdown for g in plan.gpulets if g not in together for r in g.models} == {1.0}


def test_emulation_keeps_placement_and_batches() -> None:
    plan = plan_case(case("wao-usher"))
    emulated = emulated_plan(plan, Emulation(load_shipped("thesis-v100")))

    def decided(a: Any) -> list[Any]:
        return [(g.id, g.gpu, g.share_pct, [(r.name, r.batch_size) for r in g.models]) for g in a.gpulets]

    assert decided(emulated) == decided(plan)


def test_a_replica_that_can_never_be_in_time_is_kept_when_slos_are_not_checked() -> None:
    plan = emulated_plan(plan_case(case("wao-usher")), Emulation(load_shipped("thesis-v100")))
    tight = plan.model_copy(update={"models": tuple(m.model_copy(update={"slo_ms": 5.0}) for m in plan.models)})
    with pytest.raises(InvalidInputError, match="unserveable"):
        from_plan(tight)
    make_scheduler("thesis-router", from_plan(tight, check_slos=False))


def test_the_same_case_gives_the_same_figures() -> None:
    first, second = run_case(case()), run_case(case())
    assert first.pop("wall_s") >= 0 <= second.pop("wall_s")
    assert first == second
    json.dumps(first, allow_nan=False)


def test_both_schedulers_see_the_same_requests() -> None:
    runs = run_case(case("ao-milp", 4))["runs"]
    assert runs["thesis-router"]["requests"] == runs["deferred"]["requests"]
    assert runs["thesis-router"]["offered_rps"] == runs["deferred"]["offered_rps"]


def test_a_policy_that_cannot_plan_says_what_it_lacks() -> None:
    models = (*FIVE_MODELS[:4], "xlnet")  # of which nothing is derived
    figures = run_case(case("igniter", models=models))
    assert "runs" not in figures
    assert "xlnet" in figures["error"]


@pytest.mark.parametrize("policy", sorted(DERIVED_FOR))
def test_policies_of_shares_plan_with_shares_and_say_that_these_are_derived(policy: str) -> None:
    quick = {"requests": "500"} if policy == "tenuto" else {}
    figures = run_case(case(policy, gpus=5, options=quick), ("thesis-router",))
    assert figures["profile"] == "thesis-v100-derived"
    assert figures["promised_rps"] == pytest.approx(2500.0)
    if policy not in ("ideal", "tenuto"):  # which may choose whole GPUs
        assert any((gpulet.get("share_pct") or 100.0) < 100.0 for gpulet in figures["plan"]["gpulets"])


def test_derived_coefficients_stay_near_what_they_were_fitted_to() -> None:
    found = derivation()
    assert {mean < 11.0 and most < 30.0 for mean, most, _ in found.errors_pct.values()} == {True}
    published, stand_in = found.pair_errors_pct
    assert stand_in < 1.1 * published < 5.0  # percent, on 1,200 measured slowdowns


def test_shares_below_those_measured_go_on_without_a_jump() -> None:
    emulation = Emulation(load_shipped("thesis-v100"))
    factors = [emulation.share_factor("alexnet", 32, share) for share in (5.0, 9.99, 10.0, 20.0)]
    assert factors == sorted(factors, reverse=True)
    assert factors[1] == pytest.approx(factors[2], rel=0.01)
    assert any("below 10 %" in note for note in emulation.notes)


def test_batches_above_the_measured_ones_go_on_along_the_line() -> None:
    emulation = Emulation(load_shipped("thesis-v100"))
    points = emulation.alone(Replica(name="vgg19", batch_size=160))
    assert points[160] == pytest.approx(points[128] + (points[128] - points[64]) / 2)
    assert any("above 128" in note for note in emulation.notes)


def test_a_third_of_the_mixed_load_is_for_language_models() -> None:
    mixed = ("alexnet", "bert", "gpt2", "mobilenet_v2", "resnet50")
    assert divided(3600.0, mixed, 2 / 3) == pytest.approx((800.0, 600.0, 600.0, 800.0, 800.0))
    assert divided(1000.0, FIVE_MODELS) == (200.0,) * 5


def test_every_figure_is_a_name_and_unknown_ones_list_them() -> None:
    assert [e.name for e in find_experiments(("6.6", "fig6.1", "Figure 6.15"))] == ["6.1", "6.15"]
    assert find_experiments(("all",)) == list(EXPERIMENTS)
    figures = [figure for e in EXPERIMENTS for figure in e.figures]
    assert figures == [f"6.{n}" for n in range(1, 16)] + ["A.1", "A.2", "A.3"]
    with pytest.raises(InvalidInputError, match=r"Did you mean 'A.3'"):
        find_experiments(("A.4",))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_keys_are_unique_and_quick_is_a_part(experiment: Any) -> None:
    full = experiment.cases(Settings(policies=("usher", "ao-milp")))
    quick = experiment.cases(Settings(policies=("usher", "ao-milp"), quick=True))
    keys = [c.key for c in full]
    assert len(keys) == len(set(keys))
    assert {c.key for c in quick} < set(keys)
    assert {c.sent_share for c in experiment.cases(Settings(clients="exact"))} == {1.0}


def test_every_experiment_has_points_to_run_live() -> None:
    settings = Settings(policies=("igniter", "usher", "wao-usher", "ao-milp", "wsm-milp"))
    for experiment in EXPERIMENTS:
        detailed = experiment.in_detail(experiment.cases(settings))
        assert len(detailed) == len(experiment.details) > 0


def test_the_order_of_rows_is_that_of_the_cases_on_any_number_of_processes() -> None:
    cases = [case("ffd", gpus=n, duration_s=0.2) for n in (2, 3)]
    alone = runner.run_cases(cases, ["thesis-router"], jobs=1, report=lambda *_: None)
    both = runner.run_cases(cases, ["thesis-router"], jobs=2, report=lambda *_: None)
    assert [{**row, "wall_s": 0} for row in alone.rows] == [{**row, "wall_s": 0} for row in both.rows]
    assert alone.is_whole
    assert both.is_whole


def test_an_interruption_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., dict[str, Any]] = run_case

    def interrupted(one: Case, schedulers: Sequence[str]) -> dict[str, Any]:
        if one.gpus == 3:
            raise KeyboardInterrupt
        return real(one, schedulers)

    monkeypatch.setattr(runner, "run_case", interrupted)
    cases = [case(gpus=n) for n in (2, 3, 4)]
    finished = runner.run_cases(cases, ["thesis-router"], jobs=1, report=lambda *_: None)
    assert [row["case"]["gpus"] for row in finished.rows] == [2]
    assert not finished.is_whole


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


def test_the_command_writes_a_page_and_a_result(tmp_path: Path) -> None:
    ran = run_command(
        "6.15", "--quick", "--policy", "wsm-milp", "--duration-s", "1", "--jobs", "1", "-o", str(tmp_path)
    )
    assert ran.exception is None
    assert ran.return_value == 0
    document = json.loads((tmp_path / "figure-6.15" / "result.json").read_text(encoding="utf-8"))
    assert document["complete"]
    assert {row["series"] for row in document["points"]} == {"wsm-milp"}
    assert document["observations_summary"]["not checked"] >= 2  # AO-MILP was not run
    page = (tmp_path / "figure-6.15" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!#)", page)  # nothing is loaded from elsewhere
    assert "<script" not in page
    for anchor in re.findall(r'href="#(\w+)"', page):
        assert f'id="{anchor}"' in page
    again = run_command("6.15", "--quick", "-o", str(tmp_path))
    assert isinstance(again.exception, InvalidInputError)
    assert "--force" in str(again.exception)


def test_an_interrupted_command_writes_a_partial_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(one: Case, schedulers: Sequence[str]) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_case", interrupted)
    ran = run_command("6.1", "6.15", "--quick", "--policy", "usher", "--jobs", "1", "-o", str(tmp_path))
    assert ran.return_value == 1
    assert "Incomplete" in (tmp_path / "figure-6.1" / "index.html").read_text(encoding="utf-8")
    assert not (tmp_path / "figure-6.15" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("6.99",), "no such experiment"),
        (("igniter-17",), "igniter-15, igniter-16"),
        (("6.1", "--policy", "ushr"), "Did you mean 'usher'"),
        (("6.1", "--seed", "-1"), "--seed"),
        (("6.1", "--duration-s", "0"), "--duration-s"),
        (("6.1", "--jobs", "0"), "--jobs"),
    ],
)
def test_bad_arguments_name_their_cure(arguments: tuple[str, ...], words: str) -> None:
    ran = run_command(*arguments)
    error = ran.exception
    if isinstance(error, click.BadParameter):  # raised by the types of click's options
        assert error.param is not None
        assert words in error.param.opts
    else:
        assert isinstance(error, InvalidInputError)
        assert words in str(error)


def test_the_list_names_every_experiment() -> None:
    ran = run_command("list", "--json")
    names = [row["name"] for row in json.loads(ran.output)["experiments"]]
    assert names == [*(e.name for e in EXPERIMENTS), *FIGURES]
