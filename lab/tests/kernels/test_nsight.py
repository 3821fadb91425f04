from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.errors import InvalidInputError
from tenuto.profiles import ModelProfile, Profile, ProfilePoint
from tenuto.profiles.measuring.kernels.chrome_trace import load_chrome_trace
from tenuto_lab.kernels.kernel_matching import base_name, match_kernels
from tenuto_lab.kernels.nsight_compute import load_ncu, parse_ncu
from tenuto_lab.kernels.nsight_import import ImportRequest, import_kernels, time_weighted_mean
from tenuto_lab.kernels.nsight_systems import load_nsys, parse_nsys
from tests.profiles.measuring.kernels.test_kernels import DATA, kernel

NCU, NSYS = (str(Path(__file__).parent / "data" / name) for name in ("ncu_raw.csv", "nsys_gpu_trace.csv"))
TRACE = str(DATA / "kineto_trace.json")
NCU_TEXT, NSYS_TEXT = Path(NCU).read_text(), Path(NSYS).read_text()


def test_nsight_compute_units_and_thousands() -> None:
    report = load_ncu(NCU)
    assert report.compute_capability == (7, 0)
    first, *_, last = report.kernels
    assert (first.grid, first.block, first.registers_per_thread) == ((98, 1, 1), (256, 1, 1), 128)
    assert (first.duration_us, first.shared_memory_bytes) == (101.0, 12544)
    assert (first.achieved_occupancy_pct, first.l2_util_pct, first.dram_util_pct) == (12.5, 30.0, 20.0)
    assert last.shared_memory_bytes == 8704
    assert last.start_us == pytest.approx(162.5)  # back to back
    in_us = parse_ncu(NCU_TEXT.replace('"%","ns"', '"%","usecond"').replace('"101,000"', '"101.0"'))
    assert in_us.kernels[0].duration_us == 101.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NCU_TEXT.replace("lts__throughput", "other__throughput"), "lts__throughput.*column is missing.*--metrics"),
        (NCU_TEXT.replace('"%","ns"', '"%","cycle"'), "not a unit known here"),
        (NCU_TEXT.replace('"","","","","",""', '"9","","","","",""'), "no row of units"),
        (NCU_TEXT.replace('"101,000"', '"fast"'), "kernel 1: gpu__time_duration.sum.*not a number"),
        (NCU_TEXT.replace('"101,000"', '"n/a"'), "has no duration"),
        (NCU_TEXT.replace("(98, 1, 1)", "98"), "not a launch size"),
        ('"ID","Kernel Name","Block Size","Grid Size","Metric Name"\n', "details page.*--page raw"),
        (NCU_TEXT.rstrip()[:-20], "row 5.*cells where the header has"),
        ("==ERROR== no kernels were profiled", "no header with the columns"),
    ],
)
def test_wrong_nsight_compute_files(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_ncu(text)


def test_nsight_systems_leaves_copies_out() -> None:
    kernels = load_nsys(NSYS)
    assert [k.start_us for k in kernels] == [1070, 1171, 1171, 1220]
    assert (kernels[0].registers_per_thread, kernels[0].shared_memory_bytes) == (128, 13000)
    assert kernels[2].stream == 20
    seconds = NSYS_TEXT.replace("Duration (ns)", "Duration (sec)").replace(",100000,101,", ",0.0001,101,")
    assert parse_nsys(seconds)[0].duration_us == pytest.approx(100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NSYS_TEXT.replace("Reg/Trd", "Registers"), "Reg/Trd.*column is missing"),
        (NSYS_TEXT.replace("Start (ns)", "Start (ticks)"), "not a unit known here"),
        (NSYS_TEXT.replace("Start (ns)", "Start"), "not a unit known here"),
        (NSYS_TEXT.replace(",128,0.013", ",,0.013"), "row 2.*has no Reg/Trd"),
        ("\n".join(NSYS_TEXT.splitlines()[:4]), "holds no kernels"),
        ("", "no header"),
    ],
)
def test_wrong_nsight_systems_files(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_nsys(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int)", "vectorized_elementwise_kernel"),
        ("volta_sgemm_64x64_tn", "volta_sgemm_64x64_tn"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 5>(float *)", "softmax_warp_forward"),
        ("reduce_kernel(const int *, int)", "reduce_kernel"),
    ],
)
def test_a_kernels_own_name(name: str, expected: str) -> None:
    assert base_name(name) == expected


def test_kernels_are_matched_by_name_order_and_launch_configuration() -> None:
    trace = load_chrome_trace(TRACE).kernels
    matched = match_kernels(trace, load_ncu(NCU).kernels)
    assert (matched.unmatched, matched.unused) == (0, 0)
    assert [k.achieved_occupancy_pct for k in matched.kernels] == [12.5, 20.0, 6.25, 24.0]
    assert [k.duration_us for k in matched.kernels] == [100, 40, 20, 80]
    twice = [replace(trace[0]), replace(trace[0], grid=(1, 1, 1)), replace(trace[0])]
    measured = [replace(trace[0], l2_util_pct=1.0), replace(trace[0], l2_util_pct=2.0)]
    found = match_kernels(twice, measured)
    assert [k.l2_util_pct for k in found.kernels] == [1.0, None, 2.0]
    assert (found.unmatched, found.unused) == (1, 0)
    with pytest.raises(InvalidInputError, match="no kernel of the one file is in the other"):
        match_kernels(trace, [replace(trace[0], name="other")])


def profile(gpu_type: str = "v100") -> Profile:
    first = ProfilePoint(batch_size=4, latency_ms=1.0, metrics={"runs": 10.0})
    points = (first, ProfilePoint(batch_size=8, latency_ms=2.0))
    return Profile(name="p", gpu_type=gpu_type, source="test", models={"net": ModelProfile(points=points)})


def test_time_weighted_means_need_every_kernel() -> None:
    known = [kernel(duration=30, occupancy=50), kernel(duration=10, occupancy=90)]
    assert time_weighted_mean(known, lambda k: k.achieved_occupancy_pct) == pytest.approx(60)
    assert time_weighted_mean([*known, kernel()], lambda k: k.achieved_occupancy_pct) is None
    assert time_weighted_mean([], lambda k: 1.0) is None


def test_an_import_sets_the_points_metrics_and_says_where_from() -> None:
    merged = import_kernels(profile(), ImportRequest("net", 4, ncu=NCU, nsys=NSYS))
    point = merged.models["net"].point(4)
    assert point.metrics["runs"] == 10
    assert point.metrics["occupancy_estimated"] == 0
    assert point.metrics["achieved_occupancy_pct"] == pytest.approx(26.25)  # two kernels at once
    expected = (100 * 12.5 + 20 * 26.25 + 20 * 20 + 80 * 24) / 220  # the two start together, one for 20, one for 40 us
    assert point.metrics["wavg_ach_occ_pct"] == pytest.approx(expected, abs=1e-3)
    assert point.metrics["l2_util_pct"] == pytest.approx((30 * 100 + 40 * 40 + 25 * 20 + 15 * 80) / 240, abs=1e-3)
    assert merged.models["net"].point(8).metrics == {}
    assert "4 of 4 kernels" in merged.models["net"].doubts[0]
    again = import_kernels(merged, ImportRequest("net", 4, trace=TRACE))
    assert len(again.models["net"].doubts) == 1
    assert "occupancy estimated" in again.models["net"].doubts[0]
    assert import_kernels(profile(), ImportRequest("net", 8, ncu=NCU)).models["net"].point(8).metrics["kernels"] == 4
    halves = import_kernels(profile(), ImportRequest("net", 4, ncu=NCU, batches=2)).models["net"].point(4)
    assert halves.metrics["kernels"] == 2
    assert Profile.model_validate(merged.model_dump(by_alias=True)) == merged


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ImportRequest("net", 4), "nothing to import"),
        (ImportRequest("other", 4, ncu=NCU), "not in the profile file.*It has: net"),
        (ImportRequest("net", 5, ncu=NCU), "were not measured.*Measured: 4 at 100 %"),
        (ImportRequest("net", 4, ncu=NCU, batches=3), "does not divide the 4"),
        (ImportRequest("net", 4, ncu=NCU, batches=0), "at least 1"),
        (ImportRequest("net", 4, nsys=NSYS, trace=TRACE), "only one of the two"),
        (ImportRequest("net", 4, ncu="absent.csv"), "no such file"),
    ],
)
def test_wrong_imports(request_: ImportRequest, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        import_kernels(profile(), request_)


def test_files_of_another_gpu_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="not that of a a100"):
        import_kernels(profile("a100"), ImportRequest("net", 4, ncu=NCU))
    with pytest.raises(InvalidInputError, match="SM count and compute capability"):
        import_kernels(profile("cpu"), ImportRequest("net", 4, ncu=NCU))


def test_the_verb_merges_files_into_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    row = profile().models["net"]
    path.write_text(profile().model_copy(update={"models": {"resnet50": row}}).dump())
    with pytest.raises(SystemExit) as end:
        main(f"kernels import resnet50 --profile {path} --batch-size 4 --ncu {NCU} --nsys {NSYS}".split())
    assert (end.value.code or 0) == 0
    assert "4 of 4 kernels" in capsys.readouterr().out
    assert Profile.load(path).models["resnet50"].point(4).metrics["dram_util_pct"] > 0
