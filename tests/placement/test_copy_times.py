"""`streaming` from the workload to the plan, what it costs to change it, and where the copies' times come from."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.deployments.serve.diff import diff
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.copy_times import copy_ms_per_request
from tenuto.placement.policy import load_policy
from tenuto.profiles import ModelProfile, Profile, Profiles

POINTS = [
    {"batch_size": 1, "latency_ms": 2.0, "metrics": {"h2d_ms": 0.2, "d2h_ms": 0.01}},
    {"batch_size": 8, "latency_ms": 5.0, "metrics": {"h2d_ms": 0.8, "d2h_ms": 0.08}},
    {"batch_size": 8, "share_pct": 50.0, "latency_ms": 9.0},
]
MODEL = ModelProfile.model_validate({"points": POINTS})


def plan(*groups: dict[str, Any], **keys: Any) -> Plan:
    found = groups or ({"type": "v100", "count": 1},)
    profiles = [
        Profile.model_validate({"name": kind, "source": "test", "gpu_type": kind, "models": {"m": {"points": POINTS}}})
        for kind in dict.fromkeys(group["type"] for group in found)
    ]
    workload = parse_document(Workload, {"models": [{"name": "m", "rate_rps": 50, "slo_ms": 50}], **keys})
    cluster = parse_document(Cluster, {"nodes": [{"name": "n0", "gpus": list(found)}]})
    return solve(load_policy("symphony"), workload, cluster, Profiles(profiles))


REAL = {"type": "h200", "count": 1, "uuids": ["GPU-0"]}


@pytest.mark.parametrize(
    ("groups", "keys", "streams"),
    [
        ((REAL,), {}, True),
        ((REAL,), {"streaming": False}, False),
        (({"type": "h200", "count": 1},), {}, False),  # logical: emulated, or not known to be there
        ((REAL, {"type": "v100", "count": 1, "uuids": ["GPU-1"]}), {}, False),
        (({"type": "v100", "count": 1, "uuids": ["GPU-1"]},), {"streaming": True}, True),
    ],
)
def test_real_gpus_that_are_fast_stream_unless_the_workload_says_otherwise(
    groups: tuple[dict[str, Any], ...], keys: dict[str, Any], streams: bool
) -> None:
    assert plan(*groups, **keys).streaming is streams


def test_a_plan_says_so_and_carries_the_copies_of_the_profile() -> None:
    streaming = plan(streaming=True)
    assert streaming.streaming
    (replica,) = streaming.gpulets[0].models
    assert replica.copy_in_ms == 0.1
    assert replica.copy_out_ms == 0.01
    assert Plan.from_data(streaming.to_data()) == streaming


def test_without_it_a_plan_is_written_as_before() -> None:
    data = plan().to_data()
    assert "streaming" not in data
    assert "copy_in_ms" not in data["gpulets"][0]["models"][0]


def test_a_change_restarts_the_gpulets() -> None:
    (change,) = diff(plan(), plan(streaming=True))
    assert (change.kind, change.reasons) == ("restart", ("streaming: False → True",))


@pytest.mark.parametrize(
    ("size", "share", "expected"),
    [(1, 100.0, (0.2, 0.01)), (3, 100.0, (0.1, 0.01)), (16, 100.0, (0.1, 0.01)), (8, 50.0, (0.1, 0.01))],
)
def test_copies_are_those_of_the_measured_batch_that_holds_the_planned_one(
    size: int, share: float, expected: tuple[float, float]
) -> None:
    assert copy_ms_per_request(MODEL, size, share) == expected


def test_unmeasured_copies_are_unknown() -> None:
    assert copy_ms_per_request(ModelProfile.model_validate({"line": {"alpha_ms": 1, "beta_ms": 1}}), 4, 100.0) == (
        None,
        None,
    )


def test_a_wrong_value_names_the_key() -> None:
    with pytest.raises(InvalidInputError, match="streaming"):
        parse_document(Workload, {"models": [], "streaming": "sometimes"})
