"""USHER's estimator on machines that were made up, so that what it should say is known."""

from dataclasses import replace

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto_lab.estimator.features import starting_together
from tenuto_lab.estimator.roofline import KernelTimes
from tenuto_lab.estimator.trace import Operator, Trace
from tenuto_lab.kernels.operator_times import OperatorFile, TimedKernel, TimedOperator, TimedRun
from tenuto_lab.kernels.usher import UsherEstimator, usher_errors

SLOW = KernelTimes(1e9, 1e7, 0.01, {"conv1": 0.5, "norm": 2.0})
FAST = KernelTimes(4e9, 3e7, 0.005, {"conv1": 0.5, "norm": 2.0})


GROWS = {"matmul": 0.5, "norm": 1.0, "conv1": 2.0}  # what an operator writes for a byte it reads


def networks(count: int) -> list[tuple[str, Trace]]:
    """Chains of operators of which everything follows from the published features: batch, weights, inputs, FLOPs."""
    random = np.random.default_rng(1)
    made = []
    for index in range(count):
        for batch in (1, 4):
            operators = []
            for i in range(int(random.integers(15, 30))):
                kind = str(random.choice(sorted(GROWS)))
                read = batch * 10 ** random.uniform(4, 7)
                flops = batch * 10 ** random.uniform(6, 9.5)
                operators.append(Operator(kind, kind, flops, read, GROWS[kind] * read, 1e5, (i - 1,) if i else ()))
            made.append((f"net{index}", Trace(batch, tuple(operators), 1e7, 1e5 * batch, 1e6 * batch)))
    return made


def occupancy_pct(operator: Operator) -> float:
    return 100 * operator.written_bytes / (operator.written_bytes + 4e5)


def timed(operator: Operator, machine: KernelTimes, kernels: int) -> TimedOperator:
    """An operator whose kernels take equal parts of its time and the last of which fills the GPU most."""
    time_ms = machine.operator_ms(operator)
    mine = (
        tuple(
            TimedKernel(
                name=f"{operator.name}_{index}",
                time_ms=time_ms / kernels,
                occupancy_pct=occupancy_pct(operator) / (kernels - index),
            )
            for index in range(kernels)
        )
        if kernels > 1
        else ()
    )
    return TimedOperator(
        name=operator.name,
        kind=operator.kind,
        flops=operator.flops,
        read_bytes=operator.read_bytes,
        written_bytes=operator.written_bytes,
        weight_bytes=operator.weight_bytes,
        time_ms=time_ms,
        kernels=mine,
        occupancy_pct=occupancy_pct(operator),
    )


def file(gpu_type: str, machine: KernelTimes, count: int = 6, kernels: int = 1) -> OperatorFile:
    runs = tuple(
        TimedRun(
            model=name,
            batch_size=trace.batch_size,
            latency_ms=machine.time_ms(trace),
            operators=tuple(timed(o, machine, kernels) for o in trace.operators),
        )
        for name, trace in networks(count)
    )
    return OperatorFile(gpu_type=gpu_type, hardware=gpu_type, runs=runs)


def test_networks_left_out_are_estimated_on_every_type() -> None:
    files = [file("slow", SLOW, 3), file("fast", FAST, 3)]
    errors = usher_errors(files)
    assert errors is not None
    assert (errors.models, errors.runs) == (3, 12)
    assert errors.time_pct < 30  # two networks to learn from
    assert usher_errors([file("slow", SLOW, 2)]) is None


def test_a_network_needs_its_parameters_and_the_largest_concurrent_set() -> None:
    made = [file("slow", SLOW, 4), file("fast", FAST, 4)]
    name, trace = networks(4)[-1]
    others = [kept for one in made if (kept := one.without(lambda model: model == name)) is not None]
    estimator = UsherEstimator(others)
    slow, fast = (estimator.need(trace, gpu_type) for gpu_type in ("slow", "fast"))
    assert slow.time_ms == pytest.approx(SLOW.time_ms(trace), rel=0.3)
    assert fast.time_ms < 0.6 * slow.time_ms  # the type is among the features
    largest = max(trace.operators, key=lambda o: o.written_bytes)
    assert slow.memory_bytes - trace.weight_bytes == pytest.approx(largest.written_bytes, rel=0.3)  # a chain
    assert slow.creq_pct == pytest.approx(occupancy_pct(largest), abs=8)
    again = replace(trace.operators[0], inputs=())
    twice = Trace(trace.batch_size, (*trace.operators, again), trace.weight_bytes, 0, 0)
    both = estimator.need(twice, "slow")
    first = trace.operators[0].written_bytes
    assert both.memory_bytes - trace.weight_bytes >= 1.4 * first  # two that start at once
    with pytest.raises(InvalidInputError, match="Types: fast, slow"):
        estimator.need(trace, "h100")
    with pytest.raises(InvalidInputError, match="at least two other models"):
        UsherEstimator([file("slow", SLOW, 1)])


def test_operators_stand_for_the_kernels_that_tracing_found() -> None:
    estimator = UsherEstimator([file("slow", SLOW, 4, kernels=2)])
    _, trace = networks(4)[0]
    need = estimator.need(trace, "slow")
    assert need.time_ms == pytest.approx(SLOW.time_ms(trace), rel=0.25)
    largest = max(o.written_bytes for o in trace.operators)
    assert need.memory_bytes - trace.weight_bytes == pytest.approx(largest, rel=0.3)  # left by the last kernel alone


def test_kernels_are_together_when_they_start_together() -> None:
    def operator(*inputs: int) -> Operator:
        return Operator("o", "norm", 0.0, 0.0, 0.0, 0.0, inputs)

    trace = Trace(1, (operator(), operator(0), operator(0)), 0.0, 0.0, 0.0)
    assert starting_together(trace, [2, 1, 1], [1.0, 1.0, 5.0, 5.0]) == [[0], [1], [2, 3]]
    assert starting_together(trace, [1, 2, 1], [1.0, 0.0005, 5.0, 5.0]) == [[0], [1, 3, 2]]
