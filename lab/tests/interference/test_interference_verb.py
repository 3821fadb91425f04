"""`tenuto interference` from the command line to the file: on the GPU of virtual time, and on this processor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.profiles import ModelProfile, Profile, ProfilePoint
from tests.cli.test_profile_on_gpu import OWN, Run

GRID = ("--batch-sizes", "1,2,4", "--shares", "20,50,100")


def test_co_runs_are_measured_under_their_shares_and_fitted(
    run: Run, verb: Run, monkeypatch: pytest.MonkeyPatch, worker_server: Callable[[str], list[str]]
) -> None:
    monkeypatch.setattr(
        "tenuto_lab.interference.co_run.WORKER", worker_server("lab.tests.interference.virtual_co_run:main")
    )
    code, _, err = run(*GRID)
    assert code == 0, err
    asked = ("measure", OWN, "--profile", "p.yaml", "--kinds", "igniter,pairs", "--seconds", "0.05", "--option")
    code, _, err = verb("interference", *asked, "width=4096", *GRID)
    assert code == 0, err
    profile = Profile.load("p.yaml")
    assert len(profile.co_runs) == 2 + 2
    for co_run in profile.co_runs:
        assert co_run.metrics["max_power_w"] == 300
        assert co_run.metrics["residents"] == len(co_run.parts)
        for part in co_run.parts:
            assert {"h2d_ms", "kernels_ms", "d2h_ms", "kernels", "kernel_gap_ms"} <= set(part.metrics)
            assert part.runs
    code, _, err = verb("interference", "fit", "p.yaml")
    assert code == 0, err
    missing = "one to five equal residents (--kinds residents), L2 use (`tenuto kernels import`)"
    assert f"igniter, scale: not fitted; not measured: {missing}" in " ".join(err.split())


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.chdir(tmp_path)
    points = tuple(ProfilePoint(batch_size=b, latency_ms=1.0) for b in (1, 2))
    profile = Profile(name="p", gpu_type="cpu", source="t", models={"scale": ModelProfile(points=points)})
    Path("p.yaml").write_text(profile.dump())
    return profile


@pytest.mark.usefixtures("alone", "quick_workers")
def test_what_a_file_holds_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    from tenuto.cli import main

    asked = f"interference measure {OWN} --profile p.yaml --kinds igniter --seconds 0.2 --device cpu --option width=8"
    said = []
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main([*asked.split(), "--batch-sizes", "1,2"])
        said.append((end.value.code or 0, Profile.load("p.yaml").co_runs, "co-run" in capsys.readouterr().err))
    assert [len(run.parts) for run in said[0][1]] == [1, 2]
    assert said[0][::2] == (0, True)
    assert said[1] == (0, said[0][1], False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kinds", "triples"), "is no kind of co-run"),
        (("--kinds", "pairs", "--seconds", "0"), "--seconds"),
        (("--kinds", "pairs", "--batch-sizes", "0"), "--batch-sizes"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_wrong_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tenuto.cli import main

    with pytest.raises(SystemExit) as end:
        main(["interference", "measure", OWN, "--profile", "p.yaml", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
