"""What a workload says of models that generate, and what a step of one costs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.files import parse_yaml
from tenuto.placement import Workload
from tenuto.placement.generates import Lengths, quantiles_of
from tenuto.profiles import Generation, ModelProfile, Profile, StepCost, StepsAt
from tenuto.profiles.generation import pairs_of

SLO = {"ttft_ms": 500.0, "tpot_ms": 50.0}
FORMS: list[Any] = [
    512,
    {"lognormal": {"median": 300.0, "sigma": 1.0}},
    {"lognormal": {"median": 300.0, "sigma": 1.5, "most": 2000.0}},
    {"quantiles": {0: 10.0, 50: 100.0, 90: 1000.0, 100: 4000.0}},
]


def model(**keys: Any) -> dict[str, Any]:
    given = {"name": "llama", "rate_rps": 1.0, "slo": SLO, "generates": {"prompt_tokens": 100, "output_tokens": 11}}
    return {key: value for key, value in (given | keys).items() if value is not None}


def workload(**keys: Any) -> Workload:
    return Workload.of_document({"models": [model(**keys)]}, "w.yaml")


@pytest.mark.parametrize("form", FORMS)
def test_a_workload_is_written_as_it_was_read(form: Any, tmp_path: Path) -> None:
    asked = workload(generates={"prompt_tokens": form, "output_tokens": 11, "max_sequences": 8})
    assert "slo_ms" not in asked.dump()
    assert Workload.of_document(parse_yaml(asked.dump()), "again") == asked
    assert asked["llama"].slo_ms == 500.0 + 10 * 50.0


@pytest.mark.parametrize("form", FORMS)
def test_drawn_lengths_have_the_mean_that_is_stated(form: Any) -> None:
    lengths = Lengths.model_validate(form)
    drawn = lengths.draw(200_000, np.random.default_rng(0))
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)


@pytest.mark.parametrize("form", [*FORMS, {"quantiles": {0: 5.0, 50: 5.0, 90: 9.0, 100: 9.0}}])
def test_the_part_up_to_a_length_is_that_of_the_drawn_ones(form: Any) -> None:
    lengths = Lengths.model_validate(form)
    drawn = lengths.draw(100_000, np.random.default_rng(0))
    for tokens in (1, 5, 9, 100, 299, 512, 2000, 4000):
        assert lengths.part_up_to(tokens) == pytest.approx((drawn <= tokens).mean(), abs=0.01)


OUT = {"output_tokens": 11}
LOG = "time_ms,model,prompt_tokens\n0,chat,5\n1,chat,40\n2,code,900\n3,chat, 12 \n\n"


def test_lengths_may_be_those_of_a_column_of_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text(LOG)
    asked = workload(
        generates={"prompt_tokens": {"trace": str(file), "column": "prompt_tokens", "model": "chat"}} | OUT
    )
    file.unlink()  # a workload that is read, and its plans, need it no more
    generates = Workload.of_document(parse_yaml(asked.dump()), "again")["llama"].generates
    assert generates is not None
    lengths = generates.prompt_tokens
    assert lengths is not None
    drawn = lengths.draw(10_000, np.random.default_rng(0))
    assert (drawn.min(), np.median(drawn), drawn.max()) == (5, pytest.approx(12, abs=1), 40)
    assert lengths.most == 40
    assert lengths.part_up_to(12) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("sigma", [0.5, 1.5, 2.5])
def test_quantiles_of_a_trace_have_its_mean_though_few_texts_have_most_tokens(sigma: float) -> None:
    drawn = 20.0 * np.exp(sigma * np.random.default_rng(1).standard_normal(20_000))
    tokens = np.maximum(1, np.rint(drawn)).astype(np.int64)
    lengths = Lengths(quantiles=quantiles_of(tokens))
    assert lengths.mean == pytest.approx(tokens.mean(), rel=0.05)
    assert lengths.most == tokens.max()


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ({"column": "tokens"}, LOG, "has no column tokens"),
        ({"column": "model"}, LOG, "line 2.*chat.*model is no whole number from 1"),
        ({"column": "prompt_tokens"}, LOG, "has rows of 2 models. Add model: NAME, such as chat"),
        ({"column": "prompt_tokens", "model": "other"}, LOG, "other.*has no such rows"),
        ({"column": "n"}, "n\n3\n0\n", "line 3"),
        ({"column": "n"}, "n\n", "has no such rows"),
        ({"column": "n", "model": "a"}, "n\n3\n", "has no column model"),
        ({}, LOG, "column: field required"),
        ({"column": "n", "most": 5}, "n\n3\n", "most"),
    ],
)
def test_a_column_that_cannot_be_read_is_refused(form: Any, text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        workload(generates={"prompt_tokens": {"trace": str(file), **form}} | OUT)
    with pytest.raises(InvalidInputError, match=r"nowhere.csv"):
        workload(generates={"prompt_tokens": {"trace": "nowhere.csv", "column": "n"}} | OUT)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantile_is_that_of_the_drawn_ones(form: Any) -> None:
    lengths = Lengths.model_validate(form)
    drawn = lengths.draw(200_000, np.random.default_rng(0))
    for part in (0.1, 0.5, 0.9):
        assert lengths.quantile(part) == pytest.approx(np.quantile(drawn, part), rel=0.02)
    assert lengths.quantile(1.0) == lengths.most


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"slo": None}, "slo_ms: field required"),
        ({"slo": None, "slo_ms": 9}, "has no `slo`"),
        ({"slo_ms": 9}, "gives both"),
        ({"generates": None}, "for models that generate"),
        ({"generates": {}}, "how long prompts and outputs are"),
        ({"slo": {"ttft_ms": 9}}, "slo.tpot_ms: field required"),
        ({"latency": {"alpha_ms": 1, "beta_ms": 1}}, "inline latency"),
        ({"generates": {"prompt_tokens": "long", "output_tokens": 1}}, "is no length"),
        ({"generates": {"prompt_tokens": 0, "output_tokens": 1}}, "prompt_tokens"),
        ({"generates": {"prompt_tokens": {"quantiles": {0: 9, 100: 5}}, "output_tokens": 1}}, "never fall"),
        ({"generates": {"prompt_tokens": 1, "output_tokens": 1, "max_batch_tokens": 9}}, "below max_sequences"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_cure(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        workload(**keys)


def test_lengths_may_come_from_a_trace() -> None:
    found = workload(generates={}, arrival={"process": "trace", "path": "t.csv"})["llama"]
    assert found.generates is not None
    assert found.generates.max_batch_tokens == 2048
    assert found.with_slo_scaled(2.0).slo_ms == 1000.0


def test_a_line_costs_the_sum_of_its_terms() -> None:
    cost = StepCost.line(10.0, 0.05, 0.1, 1e-4, 1e-7)
    assert cost.ms(100, 20, 2000, 5000) == pytest.approx(10.0 + 5.0 + 2.0 + 0.2 + 5e-4)
    assert cost.ms(100) == pytest.approx(15.0)
    assert cost.ms(0, 20) == pytest.approx(12.0)
    assert pairs_of(3, 2) == 3 + 4 + 5


def test_knots_hold_below_the_first_and_go_on_beyond_the_last() -> None:
    cost = StepCost(prefill_ms=((64, 10), (128, 12), (256, 20)), decode_ms=((1, 9), (32, 10)))
    assert [cost.ms(n) for n in (1, 64, 96, 512)] == [10, 10, 11, 36]
    assert [cost.ms(0, s) for s in (1, 32)] == [9, 10]
    assert cost.ms(32, 32) == 10  # a mixed step reads the weights once


def test_a_share_between_two_known_ones_is_linear_in_its_inverse() -> None:
    def at(share: float, ms: float) -> StepsAt:
        return StepsAt(share_pct=share, prefill_ms=((1, ms),), decode_ms=((1, ms),))

    generation = Generation(steps=(at(100, 10), at(50, 20)))
    assert generation.cost(75).ms(5) == pytest.approx(10 + 10 * (100 / 75 - 1))
    row = ModelProfile(generation=generation).scaled(2.0)
    assert row.generation is not None
    assert row.generation.cost(100).ms(5) == 20.0
    profile = Profile(name="p", gpu_type="a100", source="made up", models={"m": ModelProfile(generation=generation)})
    assert Profile.model_validate(parse_yaml(profile.dump())) == profile
