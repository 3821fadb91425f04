"""Measuring a model in processes of its own: requests, shares, time, faults, and the file that comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles import Profile, ProfilePoint
from tenuto.profiles.measuring.measure import STOPPED, Measurement, MeasureRequest, assemble, measure_model, row_name

OWN = "tests.instruments.own_models:scale"
Fake = Callable[[str], None]


@dataclass(frozen=True)
class FakeShares:
    """Shares as a daemon of a GPU with 132 SMs would give them."""

    sm_count: int = 132

    def environment(self, share_pct: float) -> Mapping[str, str]:
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share_pct:g}"}


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """Let a program stand for the worker."""

    def use(text: str) -> None:
        script = tmp_path / "fake.py"
        script.write_text("import json, os, sys\ndef say(**event): print(json.dumps(event), flush=True)\n" + text)
        monkeypatch.setattr("tenuto.profiles.measuring.measure.WORKER", [str(script)])

    return use


@pytest.fixture(scope="module")
def measured(worker_server: Callable[[str], list[str]]) -> tuple[Measurement, list[ProfilePoint]]:
    """One real measurement in a process of its own."""
    points: list[ProfilePoint] = []
    request = MeasureRequest(OWN, device="cpu", batch_sizes=(1, 2, 4), budget_s=0.05, options={"width": 8})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tenuto.profiles.measuring.measure.WORKER", worker_server("tenuto.profiles.measuring.profile_worker")
        )
        return measure_model(request, on_point=points.append), points


def test_a_model_is_measured_in_a_process_of_its_own(measured: tuple[Measurement, list[ProfilePoint]]) -> None:
    measurement, points = measured
    assert measurement.name == "scale"
    assert measurement.machine.gpu_type == "cpu"
    assert "cores" in measurement.machine.hardware
    assert measurement.machine.versions["torch"]
    assert [p.batch_size for p in measurement.profile.points] == [1, 2, 4]
    assert list(measurement.profile.points) == points
    assert measurement.profile.fit is not None
    assert measurement.profile.weights_mib is not None


def test_a_profile_file_survives_the_round_trip(
    measured: tuple[Measurement, list[ProfilePoint]], tmp_path: Path
) -> None:
    profile = assemble([measured[0]], name="here", command="tenuto profile scale")
    path = tmp_path / "profile.yaml"
    path.write_text(profile.dump())
    assert Profile.load(path) == profile
    assert profile.measured is not None
    assert profile.measured.date[:2] == "20"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (MeasureRequest("resnet51"), "not in the catalogue"),
        (MeasureRequest("resnet50", batch_sizes=(0, 1)), "at least 1"),
        (MeasureRequest("resnet50", shares=(101.0,)), "up to 100"),
        (MeasureRequest("resnet50", budget_s=0), "above 0"),
    ],
)
def test_wrong_requests_start_no_process(
    request_: MeasureRequest, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(InvalidInputError, match=message):
        measure_model(request_)


@pytest.mark.parametrize(("is_input", "raised"), [(True, InvalidInputError), (False, EnvironmentFaultError)])
def test_faults_in_the_process_reach_the_caller(is_input: bool, raised: type[Exception], fake_worker: Fake) -> None:
    fake_worker(f"say(event='failed', text='bad option', is_input={is_input})")
    with pytest.raises(raised, match="bad option"):
        measure_model(MeasureRequest(OWN, device="cpu"))


def test_without_torch_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(EnvironmentFaultError, match="needs the package 'torch'"):
        measure_model(MeasureRequest(OWN, device="cpu"))


def test_a_process_that_dies_is_reported(fake_worker: Fake) -> None:
    for code, message in (("sys.exit('torn apart')", "torn apart"), ("os.kill(os.getpid(), 9)", "memory runs out")):
        fake_worker(code)
        with pytest.raises(EnvironmentFaultError, match=message):
            measure_model(MeasureRequest(OWN, device="cpu"))


def test_time_that_is_up_before_the_first_point_is_told_as_that(fake_worker: Fake) -> None:
    fake_worker("say(event='stopped')")
    with pytest.raises(EnvironmentFaultError, match="no batch was measured before the time was up"):
        measure_model(MeasureRequest(OWN, device="cpu", time_limit_s=1.0))


ON_A_GPU = """
request = json.loads(sys.stdin.readline())
share = os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', '100')
sms = int(132 * float(share) / 100) // 2 * 2 if {is_attached} else 132
say(event='machine', device='cuda', gpu_type='h200', hardware='fake', memory_mib=1, versions={{}}, sm_count=sms)
for size in request['batch_sizes']:
    point = dict(batch_size=size, share_pct=request['shares'][0], latency_ms=1 + size)
    say(event='point', point=point | dict(metrics=dict(mps=float(share))))
"""


def test_shares_of_a_gpu_need_mps_and_get_a_process_each(fake_worker: Fake) -> None:
    fake_worker(ON_A_GPU.format(is_attached=True))
    request = MeasureRequest(OWN, shares=(50.0, 100.0, 1.0), batch_sizes=(1, 2))
    with pytest.raises(EnvironmentFaultError, match="needs CUDA MPS"):
        measure_model(request)
    measurement = measure_model(request, shares=FakeShares())
    found = [(p.share_pct, p.batch_size, p.metrics["mps"]) for p in measurement.profile.points]
    assert found == [(100, 1, 100), (100, 2, 100), (50, 1, 50), (50, 2, 50), (1, 1, 1), (1, 2, 1)]


def test_a_share_that_is_not_enforced_ends_the_run(fake_worker: Fake) -> None:
    fake_worker(ON_A_GPU.format(is_attached=False))
    with pytest.raises(EnvironmentFaultError, match="sees 132 of 132 SMs: the share is not enforced"):
        measure_model(MeasureRequest(OWN, device="cuda", shares=(50.0,)), shares=FakeShares())


def test_rows_are_named_after_the_model(tmp_path: Path) -> None:
    assert row_name("torchvision/resnet50") == "resnet50"
    assert row_name("package.module:Class.make") == "make"
    (tmp_path / "my-bert").mkdir()
    assert row_name(str(tmp_path / "my-bert") + "/") == "my-bert"


def test_a_stopped_run_is_taken_up_where_it_ended(quick_workers: None) -> None:
    request = MeasureRequest(OWN, device="cpu", batch_sizes=(1, 2), budget_s=0.02, options={"width": 8})
    stopped = measure_model(replace(request, batch_sizes=(1,)))
    assert stopped.profile.fit is None
    before = stopped.profile.model_copy(update={"doubts": (STOPPED,)})
    points: list[ProfilePoint] = []
    finished = measure_model(request, before=before, on_point=points.append)
    assert [p.batch_size for p in points] == [2]
    assert finished.profile.points[0] == before.points[0]
    assert finished.profile.fit is not None
    assert STOPPED not in finished.profile.doubts


@pytest.mark.parametrize("file", ["folder/net.onnx", "folder/net.pt2"])
def test_an_exported_network_is_measured_under_its_files_name(file: str) -> None:
    MeasureRequest(file).check()
    assert row_name(file) == "net"
