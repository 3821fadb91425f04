import math
from dataclasses import replace

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles import Measured, ModelProfile, Profile, ProfilePoint
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.estimator.device_times import DeviceTimes, fit_device_times
from tenuto_lab.estimator.estimator import CREQ_METRIC, GkEstimator, Sample, leave_one_model_out
from tenuto_lab.estimator.features import FEATURE_NAMES, concurrent_sets, features, peak_threads
from tenuto_lab.estimator.roofline import KernelTimes, fit_kernel_times, fit_roofline
from tenuto_lab.estimator.stacking import StackedRegression
from tenuto_lab.estimator.trace import Operator, Trace, trace_model
from tenuto_lab.estimator.training import collect_samples, is_same_network, source_of, tracer
from tests.instruments.small_networks import SMALL


def operator(flops: float = 0.0, moved: float = 0.0, inputs: tuple[int, ...] = (), kind: str = "matmul") -> Operator:
    return Operator("op", kind, flops, 0.0, moved, 0.0, inputs)


def trace_of(*operators: Operator, batch_size: int = 1) -> Trace:
    return Trace(batch_size, operators, 100.0, 10.0, 50.0)


TRUE = KernelTimes(flops_per_ms=1e9, bytes_per_ms=1e7, launch_ms=0.01)


def networks(count: int) -> list[tuple[str, Trace]]:
    """Return made-up networks of different mixtures of bound kinds, at two batch sizes each."""
    random = np.random.default_rng(0)
    made = []
    for index in range(count):
        for batch in (1, 4):
            operators = tuple(
                Operator(
                    "op",
                    str(random.choice(["matmul", "norm", "conv1"])),
                    batch * 10 ** random.uniform(6, 9.5),
                    0.0,
                    batch * 10 ** random.uniform(4, 7),
                    1e5,
                    (i - 1,) if i else (),
                )
                for i in range(int(random.integers(5, 30)))
            )
            made.append((f"net{index}", Trace(batch, operators, 1e7, 1e5 * batch, 1e6 * batch)))
    return made


def test_flops_of_known_networks() -> None:
    """2 x 0.30 G multiply-adds of MobileNetV2 and 2 x 0.71 G of AlexNet are what their authors count."""
    for name, gflops in (("mobilenet_v2", 0.6), ("alexnet", 1.43)):
        (trace,) = trace_model(name, (2,))
        products = sum(o.flops for o in trace.operators if o.kind not in ("norm", "elementwise")) / 2e9
        assert products == pytest.approx(gflops, rel=0.02)


def test_a_trace_holds_weights_kinds_and_dependencies() -> None:
    (trace,) = trace_model("mobilenet_v2", (2,), SMALL["mobilenet_v2"])
    kinds = {o.kind for o in trace.operators}
    assert {"conv1", "depthwise", "matmul", "norm", "elementwise"} <= kinds
    assert trace.input_bytes == 2 * 3 * 32 * 32 * 4
    assert all(source < index for index, o in enumerate(trace.operators) for source in o.inputs)
    assert sum(o.weight_bytes for o in trace.operators) == pytest.approx(trace.weight_bytes, rel=0.01)
    assert trace.input_bytes < trace.peak_bytes < sum(o.written_bytes for o in trace.operators)


@pytest.mark.parametrize("name", ["mobilenet_v2", "bert", "gpt2", "bloom_560", "t5", "xlnet"])
def test_other_batch_sizes_lie_on_the_line(name: str) -> None:
    low, high, far = trace_model(name, (2, 4, 8), SMALL[name])
    made = low.at_batch(high, 8)
    assert made.batch_size == 8
    for key in ("flops", "written_bytes", "weight_bytes"):
        expected = sum(getattr(o, key) for o in far.operators)
        assert sum(getattr(o, key) for o in made.operators) == pytest.approx(expected, rel=0.01)
    assert made.peak_bytes == pytest.approx(far.peak_bytes, rel=0.05)


def test_networks_whose_operators_change_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="depend on the batch size"):
        trace_of(operator()).at_batch(trace_of(operator(), operator(), batch_size=2), 4)


def test_roofline_takes_the_larger_bound_and_the_launch() -> None:
    assert TRUE.operator_ms(operator(flops=2e9)) == pytest.approx(2.01)
    assert TRUE.operator_ms(operator(moved=3e7)) == pytest.approx(3.01)
    assert TRUE.time_ms(trace_of(operator(), operator())) == pytest.approx(0.02)
    faster = KernelTimes(1e9, 1e7, 0.01, {"matmul": 2.0})
    assert faster.operator_ms(operator(flops=2e9)) == pytest.approx(1.01)


def test_the_constants_of_a_machine_are_found_again() -> None:
    made = networks(8)
    traces = [trace for _, trace in made]
    groups = [name for name, _ in made]
    found = fit_roofline(traces, [TRUE.time_ms(trace) for trace in traces], groups)
    assert found.flops_per_ms == pytest.approx(TRUE.flops_per_ms, rel=0.05)
    assert found.bytes_per_ms == pytest.approx(TRUE.bytes_per_ms, rel=0.05)
    slower = KernelTimes(1e9, 1e7, 0.01, {"conv1": 0.4})
    times = [slower.time_ms(trace) for trace in traces]
    by_kind = fit_kernel_times(fit_roofline(traces, times, groups), traces, times, groups)
    assert by_kind.speeds["conv1"] < 0.75 * by_kind.speeds["matmul"]


GPU = DeviceTimes(
    flops_per_ms=1e10,
    bytes_per_ms=5e8,
    launch_ms=0.03,
    copy_bytes_per_ms=1e7,
    ramp_elements=0.0,
    kernel_ms=0.003,
    overlap=4.0,
    speeds={"conv1": 0.5},
)


def test_a_device_launches_ahead_copies_inputs_and_fills_up() -> None:
    short, long = trace_of(*[operator()] * 100), trace_of(operator(flops=1e12))
    copy_ms = 10.0 / 1e7
    assert GPU.time_ms(short) == pytest.approx(100 * 0.03, rel=0.01)  # 100 kernels of 3 µs hide behind their launches
    assert GPU.time_ms(long) == pytest.approx(100.0 + 0.003 + copy_ms, rel=0.01)  # and its launch behind a long one
    in_turn = replace(GPU, overlap=1.0)
    assert in_turn.time_ms(short) == pytest.approx(100 * 0.033 + copy_ms)
    assert GPU.operator_ms(operator(flops=1e9, kind="conv1")) == pytest.approx(0.203)
    half_full = replace(GPU, ramp_elements=1000.0)
    assert half_full.operator_ms(operator(flops=1e9, moved=4000)) == pytest.approx(0.203)


def test_a_device_is_found_again_in_spite_of_one_network_that_defies_it() -> None:
    made = networks(9)
    traces, groups = [trace for _, trace in made], [name for name, _ in made]
    times = [GPU.time_ms(trace) * (4.0 if name == "net3" else 1.0) for name, trace in made]
    found = fit_device_times(traces, times, groups)
    errors = [
        abs(found.time_ms(t) / GPU.time_ms(t) - 1) for t, name in zip(traces, groups, strict=True) if name != "net3"
    ]
    assert np.mean(errors) < 0.08  # least squares would spread a factor of four over all
    on_cpu = GkEstimator(
        [Sample(n, t, ms) for n, t, ms in zip(groups, traces, times, strict=True)], launches_overlap=False
    )
    assert isinstance(on_cpu.kernels, KernelTimes)


def test_kernels_that_start_together_are_one_set() -> None:
    first = operator(flops=1e9)
    left, right = operator(flops=1e9, moved=400, inputs=(0,)), operator(flops=2e9, moved=800, inputs=(0,))
    last = operator(flops=1e9, inputs=(1, 2))
    trace = trace_of(first, left, right, last)
    assert [len(group) for group in concurrent_sets(trace, TRUE)] == [1, 2, 1]
    assert peak_threads(concurrent_sets(trace, TRUE)) == 300
    assert [len(group) for group in concurrent_sets(trace, TRUE, tau_ms=100)] == [4]
    assert concurrent_sets(trace_of(), TRUE) == []


def test_features_are_finite_and_named() -> None:
    (trace,) = trace_model("bert", (2,), SMALL["bert"])
    row = features(trace, TRUE)
    assert len(row) == len(FEATURE_NAMES)
    assert np.isfinite(row).all()
    assert row[FEATURE_NAMES.index("log_batch")] == math.log(2)


def test_stacking_learns_a_pattern_and_ignores_noise() -> None:
    random = np.random.default_rng(1)
    rows = random.standard_normal((60, 4))
    groups = [f"m{i // 5}" for i in range(60)]
    signal = 0.5 * rows[:, 0]
    learnt = StackedRegression().fit(rows, signal, groups)
    assert learnt.weights.sum() > 0.5
    assert np.abs(learnt.predict(rows) - signal).mean() < 0.1
    noise = StackedRegression().fit(rows, random.standard_normal(60), groups)
    assert not noise.weights.any()
    assert not noise.predict(rows).any()
    assert not StackedRegression().fit(rows[:10], signal[:10], groups[:10]).weights.any()


def samples(count: int) -> list[Sample]:
    machine = KernelTimes(1e9, 1e7, 0.01, {"conv1": 0.5, "norm": 2.0})
    return [
        Sample(
            name,
            trace,
            machine.time_ms(trace),
            20 + 1.5 * (trace.weight_bytes + trace.peak_bytes) / 2**20,
            100 * trace.batch_size / (trace.batch_size + 3),
        )
        for name, trace in networks(count)
    ]


def test_models_left_out_are_estimated() -> None:
    report = leave_one_model_out(samples(5))
    assert report is not None
    assert (report.models, report.points) == (5, 10)
    assert report.time_pct < 15
    assert report.worst[1] == max(report.per_model_time_pct.values())
    assert report.time_median_pct <= report.worst[1]
    assert report.memory_pct is not None
    assert report.memory_pct < 2
    assert set(report.per_model_time_pct) == {f"net{i}" for i in range(5)}
    assert leave_one_model_out(samples(2)) is None


def test_estimates_are_deterministic_and_lack_what_was_never_measured() -> None:
    known = samples(3)
    first, again = GkEstimator(known), GkEstimator(known)
    assert first.estimate(known[0].trace) == again.estimate(known[0].trace)
    bare = GkEstimator([Sample(s.model, s.trace, s.latency_ms) for s in known])
    made = bare.estimate(known[0].trace)
    assert made.memory_mib is None
    assert made.creq_pct is None
    assert made.latency_ms > 0
    with pytest.raises(InvalidInputError, match="at least two other models"):
        GkEstimator(known[:2])


def test_samples_come_from_profile_rows_that_name_a_network() -> None:
    points = (
        ProfilePoint(batch_size=1, latency_ms=2.0, memory_mib=30, metrics={CREQ_METRIC: 40}),
        ProfilePoint(batch_size=1, share_pct=50, latency_ms=4.0),
    )
    profile = Profile(
        name="here",
        gpu_type="cpu",
        source="test",
        measured=Measured(hardware="h", date="2026-01-01"),
        models={
            "small": ModelProfile(points=points, network="mobilenet_v2", options=SMALL["mobilenet_v2"]),
            "unknown-net": ModelProfile(points=points),
            "half": ModelProfile(points=points[1:], network="mobilenet_v2"),
        },
    )
    (sample,) = collect_samples([profile])
    assert (sample.model, sample.latency_ms, sample.memory_mib, sample.creq_pct) == ("small", 2.0, 30, 40)
    assert sample.trace.input_bytes == 3 * 32 * 32 * 4
    assert source_of(profile, "unknown-net") is None


def test_rows_of_symphony_are_traced_as_torchvision_knows_them_and_learnt_from_their_line() -> None:
    zoo = load_shipped("symphony-a100")
    few = zoo.model_copy(update={"models": {n: zoo.models[n] for n in ("MobileNetV3Small", "NASNetMobile")}})
    found = collect_samples([few])
    assert [(s.model, s.trace.batch_size) for s in found] == [("MobileNetV3Small", b) for b in (1, 8, 32)]
    assert found[1].latency_ms == zoo.models["MobileNetV3Small"].latency_ms(8)
    assert is_same_network("MobileNetV3Small", "mobilenet_v3_small")
    assert not is_same_network("ResNet50", "ResNet101")
    assert found[0].trace.weight_bytes == pytest.approx(2.54e6 * 4, rel=0.02)  # torchvision counts 2.54 M parameters


def test_a_users_own_model_is_traced() -> None:
    trace = tracer("tests.instruments.own_models:scale", {"width": 8})(16)
    assert [o.name for o in trace.operators] == ["mul", "sum"]
    assert trace.input_bytes == 16 * 8 * 4
