"""The workload file: what it accepts, and that every fault is told at once with path, value, rule and cure."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError, MissingProfileError
from tenuto.files import parse_yaml
from tenuto.placement import Cluster, ModelSpec, Workload, profile_of
from tenuto.placement.application import Application
from tenuto.placement.arrivals.arrival_processes import arrival_times
from tenuto.placement.generates import Lengths
from tenuto.placement.workload import profile_by_size, size_parts
from tenuto.profiles import Generation, LatencyTable, LinearLatency, Profile, Profiles
from tenuto.profiles.generation import StepCost
from tests.placement.published import thesis

GOOD = {"name": "a", "rate_rps": 10, "slo_ms": 100}


def problems(*models: dict[str, object], **more: object) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        parse_document(Workload, {"models": list(models), **more}, origin="w.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"rate_rps": 0}, "models.0.rate_rps", "greater than 0"),
        ({"rate_rps": -3}, "models.0.rate_rps", "greater than 0"),
        ({"slo_ms": 0}, "models.0.slo_ms", "greater than 0"),
        ({"rate_rps": "fast"}, "models.0.rate_rps", "Give a number without a unit"),
        ({"rate_rps": float("inf")}, "models.0.rate_rps", "finite"),
        ({"name": "../etc"}, "models.0.name", "letters, digits"),
        ({"slo": 100}, "models.0.slo", "mapping of keys"),
        ({"latency": {"alpha_ms": 1}}, "models.0.latency.beta_ms", "Add this key"),
        ({"latency": {"alpha_ms": 1, "beta_ms": -1}}, "models.0.latency.beta_ms", "greater than or equal to 0"),
        ({"latency": {"points": {1: -2}}}, "models.0.latency.points.1", "greater than 0"),
        ({"latency": {"points": {0: 2}}}, "models.0.latency.points", "batch sizes must be at least 1"),
        ({"latency": {"points": {1: 2}, "beta_ms": 1}}, "models.0.latency.beta_ms", "keep one form"),
        ({"latency": 5}, "models.0.latency", "mapping"),
        ({"latency": {"alpha_ms": 1, "beta_ms": 1}, "profile": "b"}, "models.0", "keep one of them"),
        ({"weight": 0}, "models.0.weight", "greater than 0"),
        ({"arrival": {"proces": "poisson"}}, "models.0.arrival.proces", "Did you mean 'process'?"),
    ],
)
def test_each_fault_is_told_once_with_its_cure(change: dict[str, object], path: str, words: str) -> None:
    found = problems({**GOOD, **change})
    assert len(found) == 1
    assert found[0].startswith(f"w.yaml: {path}: ")
    assert words in found[0]


def test_all_faults_are_told_at_once() -> None:
    found = problems({**GOOD, "rate_rps": 0, "slo_ms": -1, "sloo": 2}, {"name": "b"}, mps="maybe", extra=1)
    assert len(found) == 7
    assert any("mps" in problem and "Use one of the values listed" in problem for problem in found)


def test_names_used_twice_are_refused() -> None:
    (found,) = problems(GOOD, GOOD)
    assert found.startswith("w.yaml: models.1.name: 'a': name is used twice. Rename one of them;")
    unknown, twice = problems(GOOD, merge=[["a", "b"], ["a", "a"]])[:2]
    assert unknown == "w.yaml: merge.0: 'b': no such model in the workload. Use one of a."
    assert twice == "w.yaml: merge.1: 'a': is named twice in the groups. Keep it in one of them."


def test_of_a_missing_key_the_mapping_around_it_is_not_shown() -> None:
    assert "w.yaml: models.0.slo_ms: field required. Add this key." in problems({"name": "b", "rate_rps": 1})


def test_a_plan_is_told_from_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    for text in ("schema: 1\ngpulets: []\n", "http_options: {port: 8001}\napplications: []\n"):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=r"^\S+: is a plan and no workload. Give the workload"):
            Workload.load(file)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_file_that_is_no_mapping_is_refused(data: object) -> None:
    with pytest.raises(InvalidInputError, match="must be a mapping"):
        parse_document(Workload, data, origin="w.yaml")


def test_files_that_cannot_be_read_are_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such file"):
        Workload.load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: [\n  {name: a\n")
    with pytest.raises(InvalidInputError, match=r"line 3, column 1: not valid YAML"):
        Workload.load(broken)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError):
        Workload.load(tmp_path / "binary.yaml")


models = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
            "rate_rps": st.floats(0.001, 1e7),
            "slo_ms": st.floats(0.1, 1e6),
        },
        optional={
            "weight": st.floats(0.1, 10),
            "profile": st.sampled_from(["resnet50", "x"]),
            "arrival": st.fixed_dictionaries({"process": st.just("gamma"), "shape": st.floats(0.1, 2)}),
        },
    ),
    unique_by=lambda model: model["name"],
    max_size=5,
)


@given(models)
def test_a_workload_survives_a_round_trip_through_yaml(entries: list[dict[str, object]]) -> None:

    workload = Workload.model_validate({"models": entries})
    assert parse_document(Workload, parse_yaml(workload.dump())) == workload


def test_scaling_multiplies_rates_only() -> None:
    workload = Workload.model_validate({"models": [GOOD]})
    assert workload.scaled(2.5)["a"].rate_rps == 25
    assert workload["a"].rate_rps == 10
    assert workload.rate_rps == 10
    with pytest.raises(KeyError):
        workload["zzz"]


def test_one_network_may_appear_with_several_slos() -> None:
    workload = Workload.model_validate(
        {
            "models": [
                {"name": "fast", "profile": "vgg19", "rate_rps": 1, "slo_ms": 50},
                {"name": "slow", "profile": "vgg19", "rate_rps": 1, "slo_ms": 500},
            ]
        }
    )
    assert profile_of(workload["fast"], "v100", thesis()) == profile_of(workload["slow"], "v100", thesis())


def test_inline_latencies_need_no_profile() -> None:
    line = Workload.model_validate({"models": [{**GOOD, "latency": {"alpha_ms": 1, "beta_ms": 2}}]})["a"]
    table = Workload.model_validate({"models": [{**GOOD, "latency": {"points": {1: 3, 4: 6}}}]})["a"]
    assert isinstance(line.latency, LinearLatency)
    assert isinstance(table.latency, LatencyTable)
    assert profile_of(line, "anything", Profiles([])).latency_ms(4) == 6
    assert profile_of(table, "anything", Profiles([])).latency_ms(2) == pytest.approx(4)


def test_an_unknown_row_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="Known: alexnet"):
        profile_of(Workload.model_validate({"models": [GOOD]})["a"], "v100", thesis())
    with pytest.raises(InvalidInputError, match="no profile was measured on GPU type 't4'"):
        profile_of(Workload.model_validate({"models": [GOOD]})["a"], "t4", thesis())


COST = {"prefill_ms": [[1, 2]], "decode_ms": [[1, 2]], "context_token_ms": 0}


@pytest.mark.parametrize(
    ("kind", "data", "path"),
    [
        (Application, {"name": "a", "slo_ms": 9, "rate_rps": 1, "stages": [{"name": "s", "model": "m", "x": 1}]}, "x"),
        (StepCost, {"prefill_ms": [["a", 1]], "decode_ms": [[1, 2]], "context_token_ms": 0}, "0"),
        (
            Generation,
            {"kv_bytes_per_token": 1, "steps": [{"prefill_ms": [[1, 2]], "decode_ms": [[1, 2]], "x": 1}]},
            "x",
        ),
    ],
)
def test_an_entry_with_a_fault_is_not_missing_too(kind: type[BaseModel], data: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_document(kind, data)
    assert [problem.path.rpartition(".")[2] for problem in caught.value.problems] == [path]
    assert "at least 1 item" not in str(caught.value)


def test_a_list_without_entries_is_refused_as_such() -> None:
    with pytest.raises(InvalidInputError, match="Give at least one entry"):
        parse_document(Application, {"name": "a", "slo_ms": 9, "rate_rps": 1, "stages": []})


def by_tokens(*sizes: int) -> Profiles:
    points = [{"batch_size": b, "sizes": {"tokens": n}, "latency_ms": 1.0 + n * b} for n in sizes for b in (1, 2)]
    models = {"encoder": {"points": points}, "fixed": {"points": [{"batch_size": 1, "latency_ms": 1.0}]}}
    return Profiles([Profile.model_validate({"name": "p", "gpu_type": "cpu", "source": "test", "models": models})])


def test_a_model_whose_requests_vary_costs_the_mean_over_the_sizes_that_come() -> None:
    quantiles = {"quantiles": {0: 1, 50: 10.5, 100: 100}}
    spec = ModelSpec(name="encoder", rate_rps=1, slo_ms=9, sizes={"tokens": Lengths.model_validate(quantiles)})
    profiles = by_tokens(10, 100)
    sized = profile_by_size(spec, "cpu", profiles)
    classes, parts = sized.size_classes, size_parts(spec, ("tokens",), sized.size_classes)
    assert (classes[0], classes[-1], parts[0]) == ((10,), (100,), pytest.approx(0.5))
    mean_ms = profile_of(spec, "cpu", profiles).latency_ms(2)
    assert mean_ms == pytest.approx(sum(part * (1 + 2 * n) for part, (n,) in zip(parts, classes, strict=True)))
    assert mean_ms < 0.5 * 21.0 + 0.5 * 201.0  # without classes between the measured sizes
    assert size_parts(spec, ("tokens",), ((10,),)) == pytest.approx((0.5,))
    largest = profile_of(ModelSpec(name="encoder", rate_rps=1, slo_ms=9), "cpu", profiles)
    assert (largest.size_names, largest.latency_ms(2)) == ((), 201.0)  # all requests are padded to it
    longer = spec.model_copy(update={"sizes": {"tokens": Lengths(tokens=500)}})
    with pytest.raises(MissingProfileError, match="no batch size was measured at all sizes that come"):
        profile_of(longer, "cpu", profiles)


def test_sizes_and_the_profile_name_the_same() -> None:
    profiles = by_tokens(10)
    tokens = {"tokens": Lengths(tokens=5)}
    for name, sizes, said in (
        ("encoder", {"words": Lengths(tokens=5)}, "was measured by tokens. Give tokens: … in `sizes`"),
        ("fixed", tokens, "was measured for one size of requests only. Leave `sizes` away"),
    ):
        with pytest.raises(InvalidInputError) as error:
            profile_of(ModelSpec(name=name, rate_rps=1, slo_ms=9, sizes=sizes), "cpu", profiles)
        assert said in str(error.value)
    with pytest.raises(ValueError, match="gives `sizes`, and has an inline latency"):
        ModelSpec(name="a", rate_rps=1, slo_ms=9, sizes=tokens, latency=LinearLatency(alpha_ms=1, beta_ms=1))


TOKENS = {"prompt_tokens": {"quantiles": {0: 1, 100: 9}}, "output_tokens": {"lognormal": {"median": 9, "sigma": 1}}}
COST = {"alpha_ms": 1.0, "beta_ms": 2.0}
FILES: list[tuple[type[BaseModel], dict[str, object]]] = [
    (
        Workload,
        {
            "models": [
                {"name": "a", "rate_rps": 9.0, "slo_ms": 90.0, "weight": 2.0, "latency": COST, "survive": 0.5},
                {"name": "a:2", "share_pct": 10.0},
                {"name": "a:3", "shadow": True, "share_pct": 50.0},
                {"name": "l", "rate_rps": 1.0, "slo": {"ttft_ms": 9.0, "tpot_ms": 9.0}, "generates": TOKENS},
                {"name": "b", "rate_rps": 9.0, "slo_ms": 90.0, "arrival": {"process": "gamma", "cv": 2.0}},
                {"name": "s", "rate_rps": 9.0, "slo_ms": 90.0, "sizes": {"tokens": 9}, "options": {"x": 1}},
            ],
            "applications": [{"name": "p", "rate_rps": 1.0, "slo_ms": 90.0, "stages": [{"model": "a", "count": 1}]}],
        },
    ),
    (
        Cluster,
        {
            "nodes": [
                {
                    "name": "n",
                    "gpus": [
                        {"type": "t4", "count": 2, "price_per_hour": 1.0, "spot": {"life_hours": 9.0, "notice_s": 9.0}},
                        {
                            "type": "a100",
                            "memory_mib": 9e3,
                            "mig": "fixed",
                            "instances": [{"profile": "3g.20gb", "start": 0}],
                        },
                    ],
                }
            ],
            "elastic": False,
            "left_out": ["n/0"],
        },
    ),
]


def with_odd(data: object, odd: object) -> Iterator[object]:
    """Yield a document once for each of its values, with something odd in its place."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        for value in (odd, *with_odd(data[key], odd)):  # type: ignore[index]
            changed = copy.copy(data)
            changed[key] = value  # type: ignore[index]
            yield changed


@pytest.mark.parametrize(
    "odd",
    [{}, [], None, "", True, -1, 10**400, 1e-200, 1e300, float("inf"), float("nan")],
    ids=lambda odd: repr(odd)[:6],
)
@pytest.mark.parametrize(("kind", "data"), FILES, ids=["workload", "cluster"])
def test_an_odd_value_anywhere_is_read_or_refused(kind: type[BaseModel], data: dict[str, object], odd: object) -> None:
    parse_document(kind, data)
    for changed in with_odd(data, odd):
        with contextlib.suppress(InvalidInputError):
            read = parse_document(kind, changed)
            for spec in read.models if isinstance(read, Workload) else ():
                if 0.0 < spec.rate_rps < 100.0:
                    arrival_times(spec.name, spec.rate_rps, 1.0, spec.arrival, np.random.default_rng(0))
            if isinstance(read, Cluster):
                assert read.uncut.prices.keys() >= {gpu.type for gpu in read.uncut.gpus}


def test_a_shadow_whose_share_is_null_has_copies_of_all() -> None:
    model: dict[str, object] = {"name": "a", "rate_rps": 8.0, "slo_ms": 90.0, "latency": COST}
    app = {"name": "p", "rate_rps": 2.0, "slo_ms": 90.0, "stages": [{"model": "a"}]}
    given = [{"name": "a:2", "shadow": True, **share} for share in ({}, {"share_pct": None}, {"share_pct": 100.0})]
    rates = [
        [spec.rate_rps for spec in parse_document(Workload, {"models": [model, shadow], "applications": [app]}).models]
        for shadow in given
    ]
    assert rates[0] == rates[1] == rates[2]
