"""Every way a plan can change, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.deployments.serve.diff import diff
from tenuto.placement import Plan


def plan(
    *gpulets: dict[str, Any], mps: str = "auto", models: dict[str, Any] | None = None, gpu_type: str = "v100"
) -> Plan:
    names = sorted({m["name"] for g in gpulets for m in g["models"]})
    return Plan.from_data(
        {
            "schema": 1,
            "policy": {"name": "test"},
            "mps": mps,
            "gpus": [{"id": f"n0/{i}", "type": gpu_type} for i in range(2)],
            "gpulets": list(gpulets),
            "models": [{"name": n, "rate_rps": 10, "slo_ms": 100, **(models or {}).get(n, {})} for n in names],
        }
    )


def gpulet(name: str, *models: tuple[str, int], **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "id": name,
        "gpu": name.rsplit("/", 1)[0],
        "share_pct": 40,
        "models": [{"name": n, "batch_size": b} for n, b in models],
    }
    return {**data, **changes}


BEFORE = (gpulet("n0/0/a", ("x", 4)), gpulet("n0/0/b", ("y", 4)))


def kinds(old: Plan, new: Plan) -> dict[str, str]:
    found = diff(old, new)
    assert len({c.gpulet for c in found}) == len(found)
    assert {c.gpulet for c in found} == {g.id for p in (old, new) for g in p.gpulets}
    return {change.gpulet: change.kind for change in found}


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (gpulet("n0/0/a", ("x", 4)), "unchanged"),
        (gpulet("n0/0/a", ("x", 8)), "reconfigure"),
        (gpulet("n0/0/a", ("x", 4), ("z", 1)), "reconfigure"),
        (gpulet("n0/0/a", ("z", 4)), "reconfigure"),
        (gpulet("n0/0/a", ("x", 4), share_pct=50), "restart"),
        (gpulet("n0/0/a", ("x", 4), share_pct=None), "restart"),
        (gpulet("n0/0/a", ("x", 4), memory_mib=500), "restart"),
        (gpulet("n0/0/a", ("x", 8), share_pct=50), "restart"),
        (gpulet("n0/0/a", ("x", 4), duty_cycle_ms=20), "route-only"),
    ],
)
def test_a_change_of_one_gpulet_touches_only_it(after: dict[str, Any], kind: str) -> None:
    found = kinds(plan(*BEFORE), plan(after, BEFORE[1]))
    assert found == {"n0/0/a": kind, "n0/0/b": "unchanged"}


def test_equal_plans_change_nothing() -> None:
    found = diff(plan(*BEFORE), plan(*BEFORE))
    assert {c.kind for c in found} == {"unchanged"}


def test_rates_and_slos_are_the_entrys_business() -> None:
    found = diff(plan(*BEFORE), plan(*BEFORE, models={"x": {"rate_rps": 99}}))
    assert [(c.kind, c.reasons) for c in found] == [("route-only", ("x: rate rps",)), ("unchanged", ())]


def test_another_source_of_the_weights_is_loaded_in_place() -> None:
    found = diff(plan(*BEFORE), plan(*BEFORE, models={"x": {"weights_path": "new.safetensors"}}))
    assert [c.gpulet for c in found if c.kind == "reconfigure"] == ["n0/0/a"]
    assert "weights" in found[0].reasons[0]


def test_gpulets_that_come_and_go_leave_their_neighbours_alone() -> None:
    one, two = plan(BEFORE[0]), plan(*BEFORE)
    assert kinds(one, two) == {"n0/0/a": "unchanged", "n0/0/b": "start"}
    assert kinds(two, one) == {"n0/0/a": "unchanged", "n0/0/b": "stop"}
    other = gpulet("n0/1/a", ("y", 4))
    assert kinds(one, plan(BEFORE[0], other)) == {"n0/0/a": "unchanged", "n0/1/a": "start"}


def test_another_gpu_or_type_or_mps_mode_restarts() -> None:
    moved = gpulet("n0/0/a", ("x", 4), gpu="n0/1")
    assert kinds(plan(BEFORE[0]), plan(moved)) == {"n0/0/a": "restart"}
    assert kinds(plan(BEFORE[0]), plan(BEFORE[0], gpu_type="t4")) == {"n0/0/a": "restart"}
    assert kinds(plan(BEFORE[0]), plan(BEFORE[0], mps="off")) == {"n0/0/a": "restart"}
