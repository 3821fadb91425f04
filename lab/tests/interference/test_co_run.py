from pathlib import Path

import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles import CoRun, ModelProfile, Profile, ProfilePoint
from tenuto_lab.interference.co_run import CoRunRequest, measure_co_run
from tests.profiles.measuring.test_measure import OWN, FakeShares
from tests.profiles.measuring.test_telemetry import FakeGpu

ONE = CoRunRequest(OWN, 2, 50.0, device="cpu", options={"width": 8})

FAKE = """
import json, sys, time
request = json.loads(sys.stdin.readline())
print(json.dumps(dict(event="ready", device="{device}", sm_count={sms})), flush=True)
if sys.stdin.readline().strip():
    began, ended = {times}
    splits = dict(kernels_ms=[1.0] * len(began))
    print(json.dumps(dict(event="ran", began=began, ended=ended, splits=splits)), flush=True)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    def use(times: str = "[0, 1, 2], [1, 2, 3]", device: str = "cuda", text: str | None = None, sms: int = 66) -> None:
        script = tmp_path / "fake.py"
        made = FAKE.replace("{device}", device).replace("{times}", times).replace("{sms}", str(sms))
        script.write_text(text or made)
        monkeypatch.setattr("tenuto_lab.interference.co_run.WORKER", [str(script)])

    return use


def test_two_processes_run_at_once_and_are_measured_while_both_do(quick_workers: None) -> None:
    made = measure_co_run([ONE, CoRunRequest(OWN, 4, 50.0, device="cpu", options={"width": 8})], seconds=0.3)
    assert [(p.model, p.batch_size, p.share_pct) for p in made.parts] == [("scale", 2, 50.0), ("scale", 4, 50.0)]
    assert all(p.latency_ms > 0 and p.runs for p in made.parts)
    profile = Profile(
        name="p",
        gpu_type="cpu",
        source="test",
        co_runs=(made,),
        models={"scale": ModelProfile(points=(ProfilePoint(batch_size=2, latency_ms=1.0),))},
    )
    assert Profile.model_validate(profile.model_dump(by_alias=True)).co_runs[0] == made


def test_power_and_shares_of_a_gpu(fake: object) -> None:
    fake()  # type: ignore[operator]
    made = measure_co_run([ONE, ONE], seconds=0.1, shares=FakeShares(), telemetry=FakeGpu())
    assert isinstance(made, CoRun)
    assert made.metrics["residents"] == 2
    assert made.metrics["power_w"] > made.metrics["idle_power_w"]
    assert made.metrics["max_power_w"] == 300
    assert made.parts[0].metrics["kernels_ms"] == 1.0
    with pytest.raises(EnvironmentFaultError, match="need CUDA MPS"):
        measure_co_run([ONE, ONE], seconds=0.1)


def test_one_that_sees_more_than_its_share_would_take_turns_and_is_refused(fake: object) -> None:
    fake(sms=132)  # type: ignore[operator]
    with pytest.raises(EnvironmentFaultError, match="share of 50 % sees 132 of 132 SMs: the share is not enforced"):
        measure_co_run([ONE, ONE], seconds=0.1, shares=FakeShares())


def test_only_the_common_time_counts_and_too_short_ones_are_refused(fake: object) -> None:
    fake("([0, 9], [9, 10]) if request['batch_size'] == 2 else ([4, 5], [5, 8])", "cpu")  # type: ignore[operator]
    with pytest.raises(EnvironmentFaultError, match="Run for longer"):
        measure_co_run([ONE, CoRunRequest(OWN, 4, 50.0)], seconds=0.1)


def test_processes_that_fail_are_reported(fake: object) -> None:
    fake(text="import sys; sys.exit('torn apart')")  # type: ignore[operator]
    with pytest.raises(EnvironmentFaultError, match="torn apart"):
        measure_co_run([ONE], seconds=0.1)
    fake(text="import json; print(json.dumps(dict(event='failed', is_input=True, text='bad option')))")  # type: ignore[operator]
    with pytest.raises(InvalidInputError, match="bad option"):
        measure_co_run([ONE], seconds=0.1)
    fake(text="import sys; sys.stdin.read()")  # type: ignore[operator]
    with pytest.raises(EnvironmentFaultError, match="said nothing"):
        measure_co_run([ONE], seconds=0.1, ready_timeout_s=0.2)
    with pytest.raises(InvalidInputError, match="at least one model"):
        measure_co_run([], seconds=1)
