"""Models that generate, from the command line: a trace in virtual time."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tenuto.cli import root
from tenuto.errors import InvalidInputError
from tenuto.profiles import Generation, ModelProfile, Profile, StepCost, StepsAt

KEYS = ["mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_ms", "tokens_per_s"]


def tenuto(folder: Path, *words: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(root, words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    steps = StepsAt.model_validate(StepCost.line(10.0, 0.05, 0.1, 0.0, 0.0).model_dump())
    generation = Generation(steps=(steps,), kv_tokens=4000, longest_context=2000)
    profile = Profile(
        name="p", gpu_type="NEW-GPU", source="made up", models={"llama": ModelProfile(generation=generation)}
    )
    (tmp_path / "p.yaml").write_text(profile.dump())
    lines = ["time_ms,prompt_tokens,output_tokens", "0,100,11", "1000,200,21", "2000,200,1", "5000,1900,1000"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    write(tmp_path)
    return tmp_path


def write(folder: Path, **keys: Any) -> None:
    model = {
        "name": "llama",
        "rate_rps": 1,
        "slo": {"ttft_ms": 18, "tpot_ms": 11},
        "generates": {"max_sequences": 8, "max_batch_tokens": 256},
        "arrival": {"process": "trace", "path": "t.csv"},
    }
    (folder / "w.yaml").write_text(json.dumps({"models": [model | keys]}))


def simulated(folder: Path, *words: str) -> dict[str, Any]:
    given = ("simulate", "w.yaml", "--gpus", "NEW-GPU:1", "--profiles", "p.yaml", "--json", *words)
    result = tenuto(folder, *given)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_trace_on_a_gpu_that_only_its_profile_knows(folder: Path) -> None:
    found = simulated(folder, "--warmup-s", "1", "--duration-s", "10")
    figures = found["models"]["llama"]
    assert [key for key in KEYS if key in figures] == KEYS
    # Of the three measured one is too long for the model; the others are read in one step of 10 + 0.05 * 200 ms.
    assert {key: figures[key] for key in ("offered", "ok", "late", "rejected")} == {
        "offered": 3,
        "ok": 0,
        "late": 2,
        "rejected": 1,
    }
    assert figures["mean_ttft_ms"] == pytest.approx(20.0)
    assert figures["mean_tpot_ms"] == pytest.approx(10.1)
    assert figures["mean_ms"] == pytest.approx((20.0 + 20 * 10.1 + 20.0) / 2)
    assert figures["tokens_per_s"] == pytest.approx(22 / 9)
    assert found["gpulets"]["n0/0/a"]["batches"] == 11 + 21 + 1


def test_both_bounds_count(folder: Path) -> None:
    assert simulated(folder, "--warmup-s", "0", "--duration-s", "2")["models"]["llama"]["ok"] == 1
    write(folder, slo={"ttft_ms": 18, "tpot_ms": 10})
    assert simulated(folder, "--warmup-s", "0", "--duration-s", "2")["models"]["llama"]["ok"] == 0
    write(folder, slo={"ttft_ms": 10, "tpot_ms": 11})
    assert simulated(folder, "--warmup-s", "0", "--duration-s", "2")["models"]["llama"]["ok"] == 0


def test_goodput_is_the_highest_rate_at_which_both_bounds_are_kept(folder: Path) -> None:
    lengths = {"prompt_tokens": 90, "output_tokens": 20}
    write(folder, generates=lengths, arrival={"process": "poisson"}, slo={"ttft_ms": 200, "tpot_ms": 14}, rate_rps=10)
    words = ("w.yaml", "--gpus", "NEW-GPU:1", "--profiles", "p.yaml", "--duration-s", "60", "--json")
    result = tenuto(folder, "goodput", *words)
    assert result.exit_code == 0, result.output
    scale = json.loads(result.stdout)["rate_scale"]
    assert 0.0 < scale < 100.0
    write(
        folder,
        generates=lengths,
        arrival={"process": "poisson"},
        slo={"ttft_ms": 200, "tpot_ms": 14},
        rate_rps=10 * scale,
    )
    assert simulated(folder, "--duration-s", "60")["models"]["llama"]["attainment"] >= 0.99


def test_lengths_are_drawn_from_the_seed_alone(folder: Path) -> None:
    lengths = {"prompt_tokens": {"lognormal": {"median": 90, "sigma": 1, "most": 900}}, "output_tokens": 20}
    write(folder, generates=lengths, arrival={"process": "poisson"})
    found = [simulated(folder, "--seed", seed)["models"] for seed in ("1", "1", "2")]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"profile": "other"}, "other"),
        ({"arrival": {"process": "trace", "path": "none.csv"}}, "no such file"),
        ({"arrival": {"process": "trace", "path": "times.csv"}}, "has no column 'prompt_tokens'"),
        ({"arrival": {"process": "trace", "path": "zero.csv"}}, "output_tokens is no number of tokens"),
    ],
)
def test_what_is_missing_is_named(folder: Path, keys: dict[str, Any], said: str) -> None:
    write(folder, **keys)
    (folder / "times.csv").write_text("time_ms\n1\n")
    (folder / "zero.csv").write_text("time_ms,prompt_tokens,output_tokens\n1,5,0\n")
    result = tenuto(folder, "simulate", "w.yaml", "--gpus", "NEW-GPU:1", "--profiles", "p.yaml")
    assert isinstance(result.exception, InvalidInputError)
    assert said in str(result.exception)
