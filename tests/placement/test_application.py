"""Applications in files: what a graph may say, what of it is refused, and what stages ask of the models they share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError, Problem
from tenuto.files import parse_yaml
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.workload import lacking, own_demands
from tenuto.profiles import Profiles
from tests.instruments.fan_out import load_of

FAST = {"alpha_ms": 1.0, "beta_ms": 4.0}
DETECT: dict[str, Any] = {"name": "detect", "latency": FAST}
READ: dict[str, Any] = {"name": "read", "latency": FAST, "rate_rps": 10.0, "slo_ms": 50.0}


def application(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"name": "app", "rate_rps": 20.0, "slo_ms": 100.0, "stages": list(stages), **changes}


def workload(*applications: dict[str, Any], models: tuple[dict[str, Any], ...] = (DETECT, READ)) -> Workload:
    data = {"models": list(models), "applications": list(applications)}
    return parse_document(Workload, data, origin="w")


GRAPH = application(
    {"model": "detect", "inputs": {"x": "image"}},
    {"model": "read", "after": ["detect"], "map": "ocr:crops", "count": 3.5},
    {"model": "join", "inputs": {"x": "detect.boxes", "y": "image"}, "latency": FAST},
    outputs={"boxes": "join.y", "texts": "read.text"},
)


def test_a_shared_model_has_the_requests_of_all_that_ask_it() -> None:
    work = workload(GRAPH, {**GRAPH, "name": "other", "rate_rps": 2.0, "slo_ms": 60.0})
    assert [(m.name, m.rate_rps, m.slo_ms) for m in work.models] == [
        ("detect", 22.0, 30.0),
        ("read", 87.0, 30.0),
        ("app.join", 20.0, 50.0),
        ("other.join", 2.0, 30.0),
    ]
    detect, read = work["detect"].alone, work["read"].alone
    assert detect is not None
    assert read is not None
    assert (detect.rate_rps, detect.slo_ms, read.rate_rps, read.slo_ms) == (0.0, None, 10.0, 50.0)
    assert [(m.name, m.rate_rps, m.slo_ms) for m in own_demands(work.models, work.applications)] == [
        ("read", 10.0, 50.0)
    ]
    (app, _), graph = work.applications, work.applications[0].stages
    assert [app.model_name(stage) for stage in graph] == ["detect", "read", "app.join"]
    assert [stage.after for stage in graph] == [(), ("detect",), ("detect",)]
    assert [stage.most_requests for stage in graph] == [1, 56, 1]
    assert (work["detect"].own_slo_ms, work["read"].own_slo_ms) == (30.0, 50.0)


def test_what_is_dumped_comes_back_equal() -> None:
    work = workload(GRAPH)
    again = parse_document(Workload, work.model_dump(mode="json", exclude_defaults=True, exclude_none=True), origin="w")
    assert again == work
    assert Workload.model_validate(work.model_dump()) == work
    plan = solve(Symphony(), work, Cluster.parse("v100:4"), Profiles(()))
    assert Plan.from_data(plan.to_data()) == plan
    assert plan.workload.models == plan.models


def test_all_rates_are_scaled_together_and_count_in_no_comparison_of_entries() -> None:
    work = workload(GRAPH)
    twice = work.scaled(2.0)
    assert [m.rate_rps for m in own_demands(twice.models, twice.applications)] == [20.0]
    assert lacking(work.models, {m.name: m for m in twice.models}) == []
    stricter = work["read"].with_slo_scaled(0.5)
    assert (stricter.slo_ms, stricter.own_slo_ms) == (25.0, 25.0)
    assert lacking(work.models, {"read": stricter}) == ["read"]


def test_clients_and_applications_arrive_apart() -> None:
    work = workload(GRAPH)
    load = load_of(work, 20.0, 1)
    place = {model.name: index for index, model in enumerate(work.models)}
    alone = load.model_index[load.owner < 0]
    assert set(alone.tolist()) == {place["read"]}
    assert 150 < len(alone) < 250
    only = workload(GRAPH, models=(DETECT, {**READ, "rate_rps": 0.0}))
    calls = load_of(only, 20.0, 1)
    assert (calls.owner >= 0).all()
    assert [at for _, at in calls.calls.values()] == [at for _, at in load.calls.values()]


def test_an_old_plan_keeps_a_stages_own_model_beside_one_of_the_same_name() -> None:
    own = {"name": "app.read", "latency": FAST, "rate_rps": 20.0, "slo_ms": 100.0}
    work = workload(application({"model": "read"}), models=(READ, own))
    assert work.applications[0].model_name(work.applications[0].stages[0]) == "app.read"
    assert (work["read"].rate_rps, work["read"].alone) == (10.0, None)


def test_an_offline_application_has_offline_models_and_asks_nothing_of_others_that_is_planned() -> None:
    night = {"name": "night", "offline": True, "stages": [{"model": "read"}, {"model": "join", "latency": FAST}]}
    work = workload(night, models=(READ,))
    assert [(m.name, m.offline, m.rate_rps) for m in work.models] == [
        ("read", False, 10.0),
        ("night.join", True, 0.001),
    ]
    assert work["read"].alone is None
    assert [m.name for m in own_demands(work.models, work.applications)] == ["read"]
    assert parse_document(Workload, parse_yaml(work.dump()), origin="w") == work
    alone = solve(Symphony(), workload(models=(READ,)), Cluster.parse("v100:1"), Profiles([]))
    plan = solve(Symphony(), work, Cluster.parse("v100:1"), Profiles([]))
    assert plan.expected.models["read"] == alone.expected.models["read"]
    assert Plan.from_data(plan.to_data()).applications == plan.applications


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": [{"model": "night"}]}, "'night': is offline, and the application is not"),
        ({"offline": True, "stages": [{"model": "read", "part": 2}]}, "Remove `part`, or `offline`"),
    ],
)
def test_what_cannot_be_offline_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        workload(application(**changes), models=(READ, {"name": "night", "offline": True, "latency": FAST}))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "outputs", "words"),
    [
        ([{"model": "read", "latency": FAST}], None, "repeats latency of the workload's model 'read'"),
        ([{"model": "x", "latency": FAST, "profile": "x"}], None, "gives both 'latency' and 'profile'"),
        ([{"model": "a/b"}], None, "Give it a `name`"),
        ([{"model": "read:2"}], None, "no such version"),
        ([{"model": "detect", "count": 1.5}], None, "Give a whole number, or a function"),
        ([{"model": "detect", "most": 3}], None, "`most` without `map`"),
        ([{"model": "detect", "map": "a:b", "inputs": {"x": "y"}}], None, "`map` makes all inputs"),
        ([{"model": "detect", "map": "a:b", "count": 4, "most": 3}], None, "`count` 4 exceeds `most` 3"),
        ([{"model": "detect", "map": "no function"}], None, "names no function"),
        ([{"model": "detect", "inputs": {"x": "reed.y"}}], None, "'reed.y': names no output of a stage"),
        ([{"model": "detect", "inputs": {"x": ""}}], None, "names no output of a stage"),
        ([{"model": "detect", "count": 2}, {"model": "read", "inputs": {"x": "detect.y"}}], None, "makes up to 2"),
        (
            [{"model": "detect", "map": "a:b"}, {"model": "read", "inputs": {"x": "detect.y"}}],
            None,
            "makes up to 16 requests",
        ),
        (
            [{"model": "detect", "inputs": {"x": "read.y"}}, {"model": "read", "inputs": {"x": "detect.y"}}],
            None,
            "circle",
        ),
        ([{"model": "detect"}, {"model": "read"}], {"y": "detect.y"}, "nothing uses stage 'read'"),
        ([{"model": "detect"}], {"y": "image"}, "outputs.y"),
        ([{"model": "detect"}], {"y": "detect."}, "Write detect.OUTPUT"),
        ([{"model": "detect"}], {}, "neither a mapping"),
        ([{"model": "detect"}], "function", "names no function"),
        ([{"model": f"m{i}"} for i in range(101)], None, "at most 100"),
    ],
)
def test_what_no_graph_can_be_is_refused_with_its_cure(stages: list[Any], outputs: Any, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        workload(application(*stages, outputs=outputs), models=({**READ, "name": "detect"}, READ))
    assert words in str(caught.value)
    assert "applications.0" in str(caught.value)


def test_a_stage_asks_no_version_on_trial_and_no_version_that_is_not_there() -> None:
    second = {"name": "read:2", "share_pct": 10.0, "weights_path": "two"}
    for name, words in (("read:2", "is a version on trial"), ("read:3", "no such version"), ("red", None)):
        if words is None:
            assert workload(application({"model": name, "latency": FAST}), models=(READ, second))
            continue
        with pytest.raises(InvalidInputError, match=words):
            workload(application({"model": name}), models=(READ, second))


def test_versions_of_a_model_share_out_what_stages_ask_of_it() -> None:
    tried = ({"name": "read:2", "share_pct": 25.0}, {"name": "read:3", "shadow": True, "rate_rps": 1.0})
    by_url = {"name": "read:4", "share_pct": 0.0, "rate_rps": 1.0}
    work = workload(application({"model": "read", "count": 2}), models=(READ, *tried, by_url))
    assert {spec.name: spec.rate_rps for spec in work.models} == {
        "read": 37.5,
        "read:2": 12.5,
        "read:3": 41.0,
        "read:4": 1.0,
    }
    assert [(s.name, s.alone.rate_rps) for s in work.models if s.alone is not None] == [
        ("read", 7.5),
        ("read:2", 2.5),
        ("read:3", 1.0),
    ]
    assert Workload.of_document(parse_yaml(work.dump(), "w"), "w") == work


def test_a_model_that_a_stage_shares_cannot_leave() -> None:
    work = workload(GRAPH)
    data = {"models": [m for m in work.models if m.name != "read"], "applications": work.applications}
    with pytest.raises(InvalidInputError, match=r"applications\.0\.stages\.1\.model"):
        parse_document(Workload, data, origin="w")


def test_many_paths_are_split_at_once() -> None:
    stages = [
        {"model": f"s{i}{j}", "after": [f"s{i - 1}0", f"s{i - 1}1"] if i else [], "latency": FAST}
        for i in range(40)
        for j in (0, 1)
    ]
    work = workload(application(*stages), models=())
    assert {round(m.slo_ms, 6) for m in work.models} == {2.5}


def test_an_output_whose_name_has_dots_belongs_to_the_longest_stage() -> None:
    (app,) = workload(
        application(
            {"model": "detect"}, {"name": "end", "model": "read", "inputs": {"x": "detect.y.1"}}, outputs={"z": "end.0"}
        )
    ).applications
    assert app.source_of("detect.y.1") == ("detect", "y.1")
    assert app.source_of("image") == (None, "image")
    assert [stage.label for stage in app.last_stages] == ["end"]


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)
OTHERS = st.one_of(
    st.sampled_from(
        [0, 2, 1.5, 1e90, "m0", "m0.y", "image", "read", "read:2", "a:b", "a/b", "", ".y", "app.m0", {}, [], ["m1"]]
    ),
    JUNK,
)
KEYS = st.sampled_from(
    [
        "name",
        "after",
        "inputs",
        "map",
        "count",
        "most",
        "part",
        "budget_ms",
        "shared",
        "allow_missing",
        "latency",
        "sizes",
        "profile",
        "options",
        "outputs",
        "source",
        "alone",
        "rate_rps",
        "other",
    ]
)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Return an application that is valid beside the models `detect` and `read`."""
    stages: list[dict[str, Any]] = []
    for place in range(draw(st.integers(1, 4))):
        stage: dict[str, Any] = {"model": f"m{place}", "name": f"m{place}", "latency": FAST}
        if draw(st.booleans()):
            stage = {"model": draw(st.sampled_from(["detect", "read"])), "name": f"m{place}"}
        before = [f"m{earlier}" for earlier in range(place) if draw(st.booleans())]
        kind = draw(st.sampled_from(["after", "inputs", "map", "count"]))
        single = [
            label for label, earlier in zip((s["name"] for s in stages), stages, strict=True) if "count" not in earlier
        ]
        if kind == "inputs" and single:
            stage["inputs"] = {"x": f"{draw(st.sampled_from(single))}.y", "z": "image"}
        elif kind == "map":
            stage |= {
                "map": "a.b:c",
                "count": draw(st.sampled_from([0.5, 2, 30.0])),
                "allow_missing": draw(st.booleans()),
            }
        elif kind == "count":
            stage["count"] = draw(st.integers(2, 9))
        stages.append(stage | ({"after": before} if before else {}))
    return {"name": "app", "rate_rps": draw(st.sampled_from([1, 7.5])), "slo_ms": 90.0, "stages": stages}


@st.composite
def mutated(draw: st.DrawFn, data: Any) -> Any:
    """Return data with one value at a random place that is another, is gone, or is new."""
    if not isinstance(data, dict | list) or not data or draw(st.integers(0, 9)) == 0:
        return draw(OTHERS)
    if isinstance(data, list):
        place = draw(st.integers(0, len(data) - 1))
        kept = [] if draw(st.integers(0, 9)) == 0 else [draw(mutated(data[place]))]
        return [*data[:place], *kept, *data[place + 1 :]]
    if draw(st.integers(0, 4)) == 0:
        return {**data, draw(KEYS): draw(OTHERS)}
    key = "stages" if "stages" in data and draw(st.booleans()) else draw(st.sampled_from(sorted(data)))
    return {**data, key: draw(mutated(data[key]))}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Return a workload with none, one or two faults."""
    models = [DETECT, draw(st.sampled_from([READ, {**READ, "rate_rps": 0}, {**READ, "priority": 2}]))]
    graph = draw(graphs())
    used = {stage["model"] for stage in graph["stages"]}
    data: Any = {"models": [model for model in models if model["name"] in used], "applications": [graph]}
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(["models", "applications", "applications"]))
        data = {**data, key: draw(mutated(data[key]))}
    return data


@settings(max_examples=3 * settings.default.max_examples)
@given(documents())
def test_every_document_is_a_workload_or_every_fault_of_it_is_named_with_its_cure(data: dict[str, Any]) -> None:
    work, problems = None, list[Problem]()
    try:
        work = parse_document(Workload, data, origin="w")
    except InvalidInputError as error:
        problems += error.problems
    if work is None:
        assert problems
        assert all(problem.cure and problem.path.startswith("w") for problem in problems)
        return
    dumped = work.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    assert parse_document(Workload, dumped, origin="w") == work
    assert Workload.of_document(parse_yaml(work.dump(), "w"), "w") == work
    for application in work.applications:
        assert all(application.budget_ms(stage) > 0.0 for stage in application.stages)
        assert {application.model_name(stage) for stage in application.stages} <= {model.name for model in work.models}
