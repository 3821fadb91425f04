"""Options that a model cannot be run with are found when planning and when a plan is read, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.planner.fixed_cost import check_inputs
from tenuto.profiles import Profile, Profiles

CPU, GPU = Cluster.parse("cpu:1"), Cluster.parse("v100:1")
BOTH = Cluster.parse("v100:1,cpu:1")


def workload(merge: Any = "off", **options: dict[str, Any]) -> Workload:
    models = [
        {
            "name": name,
            "source": "resnet50",
            "rate_rps": 10,
            "slo_ms": 100,
            "options": given,
            "latency": {"alpha_ms": 2, "beta_ms": 4},
        }
        for name, given in options.items()
    ]
    return Workload.model_validate({"models": models, "merge": merge})


def plan(*gpulets: dict[str, Any], **options: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": {"name": "hand"},
        "gpus": [{"id": "g", "type": "v100"}, {"id": "c", "type": "cpu"}],
        "gpulets": [
            {
                "id": f"{g['gpu']}/{index}",
                "models": [{"name": n, "batch_size": 4} for n in g["of"]],
                **{k: v for k, v in g.items() if k != "of"},
            }
            for index, g in enumerate(gpulets)
        ],
        "models": workload(**options).model_dump(mode="json")["models"],
    }


def problems_of(step: Any, *args: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidInputError) as caught:
        step(*args)
    return caught.value.problems


def test_all_wrong_options_of_all_models_are_told_at_once() -> None:
    asked = workload(a={"dtype": "fp8", "warmup_runs": 0}, b={"image_size": "x"}, c={"compile": 1, "cuda_graphs": 1})
    asked = asked.model_copy(
        update={"models": (*asked.models, asked.models[1].model_copy(update={"name": "d", "slo_ms": 1.0}))}
    )
    found = problems_of(check_inputs, asked, GPU, Profiles([]))
    assert [p.path for p in found] == [
        "models.0.options.dtype",
        "models.0.options.warmup_runs",
        "models.2.options.cuda_graphs",
    ]
    assert problems_of(solve, load_policy("ffd"), asked, GPU, Profiles([])) == found


def test_cuda_graphs_need_a_gpu_in_the_cluster() -> None:
    asked = workload(a={"cuda_graphs": True})
    (found,) = problems_of(check_inputs, asked, CPU, Profiles([]))
    assert (found.path, found.value) == ("models.0.options.cuda_graphs", True)
    assert "NVIDIA GPU" in found.rule
    check_inputs(asked, GPU, Profiles([]))
    check_inputs(asked, BOTH, Profiles([]))  # whether it comes to lie on the CPU, its plan says
    check_inputs(workload(a={"cuda_graphs": False}), CPU, Profiles([]))


def test_a_plan_is_refused_where_it_puts_cuda_graphs_on_a_cpu() -> None:
    Plan.from_data(plan({"gpu": "g", "of": "a"}, {"gpu": "c", "of": "b"}, a={"cuda_graphs": True}, b={}))
    wrong = plan({"gpu": "g", "of": "a"}, {"gpu": "c", "of": "ab"}, a={"cuda_graphs": True}, b={"dtype": 16})
    found = problems_of(lambda: Plan.from_data(wrong, origin="plan.yaml"))
    assert [p.path for p in found] == ["plan.yaml: models.0.options.cuda_graphs", "plan.yaml: models.1.options.dtype"]


def test_groups_that_are_asked_for_refuse_options_of_single_modules() -> None:
    asked = workload([["a", "b"]], a={"dtype": "fp16", "warmup_runs": 4}, b={"pad_batches": True}, c={"dtype": "fp16"})
    found = problems_of(check_inputs, asked, GPU, Profiles([]))
    assert [(p.path, p.value) for p in found] == [
        ("models.0.options.dtype", "fp16"),
        ("models.1.options.pad_batches", True),
    ]
    assert all("merged (a+b)" in p.rule for p in found)
    whole = {"gpu": "g", "of": "ab", "merge": [["a", "b"]]}
    (found_again,) = problems_of(lambda: Plan.from_data(plan(whole, a={"channels_last": True}, b={})))
    assert found_again.path == "plan: models.0.options.channels_last"
    Plan.from_data(plan(whole, a={"warmup_runs": 4}, b={"compile": False}))


def test_auto_leaves_out_what_it_could_not_load_and_says_so() -> None:
    rows = {"a+b": {"points": [{"batch_size": 32, "latency_ms": 1.0}]}}
    measured = Profiles([Profile.model_validate({"name": "m", "gpu_type": "v100", "source": "t", "models": rows})])
    merged = solve(load_policy("symphony"), workload("auto", a={}, b={}), GPU, measured)
    assert [group.name for group in merged.gpulets[0].merge] == ["a+b"]
    apart = solve(load_policy("symphony"), workload("auto", a={}, b={"dtype": "bf16"}), GPU, measured)
    assert apart.gpulets[0].merge == ()
    assert "a+b is not merged: a merged program knows no `dtype: bf16` of b" in apart.notes
    compiled = workload("auto", a={"compile": True}, b={"compile": True})
    alike = solve(load_policy("symphony"), compiled, GPU, Profiles([]))
    assert not any("could be one program" in note for note in alike.notes)


def measured_on_h200(kind: str = "h200", **run: Any) -> Profiles:
    row = {"points": [{"batch_size": b, "latency_ms": 1.0 + b} for b in (1, 8)], "run": run or None}
    return Profiles([Profile.model_validate({"name": "p", "gpu_type": kind, "source": "t", "models": {"m": row}})])


def h200_workload(**options: Any) -> Workload:
    model = {"name": "m", "source": "resnet50", "rate_rps": 10, "slo_ms": 100, "options": options}
    return Workload.model_validate({"models": [model]})


def test_a_plan_is_refused_for_a_gpulet_that_would_run_with_other_options() -> None:
    h200 = Cluster.parse("h200:1")
    fast = measured_on_h200(dtype="bf16", cuda_graphs=True, tf32=True)
    check_inputs(h200_workload(), h200, fast)  # what is left open is what was measured
    check_inputs(h200_workload(dtype="fp32", cuda_graphs=False), h200, measured_on_h200())  # nobody knows
    (problem,) = problems_of(check_inputs, h200_workload(dtype="fp32"), h200, fast)
    assert problem.path == "models.0.options.dtype"
    assert problem.rule == "its profile on h200 was measured with bf16, but it would run with fp32"
    assert problem.cure == "Give `dtype: bf16` in its options, or measure it with --option dtype=fp32."
    eager = measured_on_h200(dtype="fp32", cuda_graphs=False)
    assert [p.path for p in problems_of(check_inputs, h200_workload(), h200, eager)] == [
        "models.0.options.dtype",
        "models.0.options.cuda_graphs",
    ]
    check_inputs(h200_workload(dtype="fp32", cuda_graphs=False), h200, eager)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_on_a_type_that_no_table_knows_what_is_left_open_is_taken_for_what_was_measured(dtype: str) -> None:
    node = {"name": "n0", "gpus": [{"type": "rtx-9999", "count": 1, "memory_mib": 16384}]}
    cluster = Cluster.model_validate({"nodes": [node]})
    measured = measured_on_h200("rtx-9999", dtype=dtype, cuda_graphs=dtype == "bf16", tf32=dtype == "bf16")
    check_inputs(h200_workload(), cluster, measured)
    other = "fp32" if dtype == "bf16" else "bf16"
    (problem,) = problems_of(check_inputs, h200_workload(dtype=other), cluster, measured)
    assert problem.rule == f"its profile on rtx-9999 was measured with {dtype}, but it would run with {other}"
