from dataclasses import replace
from pathlib import Path

import pytest

from lab.tests.estimator.test_estimator import networks
from tenuto.errors import InvalidInputError
from tenuto_lab.estimator.features import concurrent_sets
from tenuto_lab.estimator.roofline import KernelTimes
from tenuto_lab.estimator.trace import Trace, trace_model
from tenuto_lab.kernels.kernel_training import KernelEstimator, leave_one_model_out_kernels
from tenuto_lab.kernels.operator_times import OperatorFile, TimedOperator, TimedRun, time_operators
from tests.instruments.small_networks import SMALL

MACHINE = KernelTimes(1e9, 1e7, 0.01, {"conv1": 0.5, "norm": 2.0})


def made_runs(count: int) -> list[TimedRun]:
    """Return operators of a made-up machine whose networks cost a tenth more than their kernels."""
    return [
        TimedRun(
            model=name,
            batch_size=trace.batch_size,
            latency_ms=1.1 * MACHINE.time_ms(trace),
            operators=tuple(
                TimedOperator(
                    name=o.name,
                    kind=o.kind,
                    flops=o.flops,
                    read_bytes=o.read_bytes,
                    written_bytes=o.written_bytes,
                    weight_bytes=o.weight_bytes,
                    time_ms=MACHINE.operator_ms(o),
                )
                for o in trace.operators
            ),
        )
        for name, trace in networks(count)
    ]


def test_kernels_of_a_machine_are_learnt_and_add_up() -> None:
    report = leave_one_model_out_kernels(made_runs(4))
    assert report is not None
    assert (report.models, report.runs) == (4, 8)
    assert report.time_pct < 10
    assert report.kernel_median_pct < 15
    assert report.time_pct < report.roofline_pct
    assert leave_one_model_out_kernels(made_runs(2)) is None
    with pytest.raises(InvalidInputError, match="at least two other models"):
        KernelEstimator(made_runs(1))


def test_learnt_times_say_which_kernels_start_together() -> None:
    estimator = KernelEstimator(made_runs(2))
    trace = networks(2)[0][1]
    assert sum(len(group) for group in concurrent_sets(trace, estimator)) == len(trace.operators)


def test_the_compute_requirement_is_learnt_from_the_occupancy_of_kernels() -> None:
    def filled(run: TimedRun) -> TimedRun:
        occupied = tuple(
            o.model_copy(update={"occupancy_pct": 100 * o.written_bytes / (o.written_bytes + 4e5)})
            for o in run.operators
        )
        return run.model_copy(update={"operators": occupied})

    runs = [filled(run) for run in made_runs(4)]
    name, trace = networks(4)[-1]
    estimator = KernelEstimator([run for run in runs if run.model != name])
    creq_pct = estimator.creq_pct(trace)
    assert creq_pct is not None
    largest = max(o.written_bytes for o in trace.operators)
    assert creq_pct == pytest.approx(100 * largest / (largest + 4e5), abs=5)  # a chain: one kernel at a time
    together = Trace(1, (*trace.operators, replace(trace.operators[0], inputs=())), 0.0, 0.0, 0.0)
    first = 100 * trace.operators[0].written_bytes / (trace.operators[0].written_bytes + 4e5)
    both = estimator.creq_pct(together)
    assert both is not None
    assert both >= min(99.0, 1.8 * first)  # two kernels that start at once
    assert KernelEstimator(made_runs(3)).creq_pct(trace) is None


def test_operators_are_timed_as_they_are_traced() -> None:
    (run,) = time_operators("mobilenet_v2", (2,), SMALL["mobilenet_v2"], name="mobilenet_v2")
    (trace,) = trace_model("mobilenet_v2", (2,), SMALL["mobilenet_v2"])
    assert [o.name for o in run.operators] == [o.name for o in trace.operators]
    assert [o.flops for o in run.operators] == [o.flops for o in trace.operators]
    assert all(o.time_ms > 0 for o in run.operators)
    assert run.latency_ms > 0


def test_the_file_survives_the_round_trip(tmp_path: Path) -> None:
    made = OperatorFile(gpu_type="cpu", hardware="h", runs=tuple(made_runs(2)))
    path = tmp_path / "operators.yaml"
    path.write_text(made.dump())
    assert OperatorFile.load(path) == made
    path.write_text("gpu_type: cpu\nhardware: h\nruns: []\n")
    with pytest.raises(InvalidInputError, match="runs"):
        OperatorFile.load(path)
