"""`tenuto fit-requests`: a profile that a workload takes, and the arguments that it refuses."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tenuto.errors import InvalidInputError
from tenuto.profiles import Profile
from tenuto_lab.verbs.fit_requests import command


def fitted(folder: Path, *words: str) -> Result:
    lines = ["queued_s,input_tokens,output_tokens,first_token_s,last_token_s"]
    for at, prompt in ((0, 100), (1, 300)):
        first = at + 0.01 + prompt * 5e-5
        lines.append(f"{at},{prompt},5,{first},{first + 0.04}")
    (folder / "log.csv").write_text("\n".join(lines))
    (folder / "trace.csv").write_text("time_ms\n1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(command, words)


def test_a_profile_comes_from_a_log(tmp_path: Path) -> None:
    result = fitted(tmp_path, "log.csv", "--gpu", "NEW-GPU", "--name", "llama", "-o", "p.yaml")
    assert result.exit_code == 0, result.output
    assert "warning: the log has 2 requests" in result.stderr
    profile = Profile.load(tmp_path / "p.yaml")
    assert profile.gpu_type == "NEW-GPU"
    generation = profile.models["llama"].generation
    assert generation is not None
    assert generation.cost().ms(0, 1) == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("log.csv --name m", "--gpu"),
        ("log.csv --gpu a100", "--name"),
        ("log.csv --gpu a100 --name m --max-sequences 0", "x>=1"),
    ],
)
def test_arguments_that_are_missing_or_impossible_are_refused(tmp_path: Path, words: str, said: str) -> None:
    result = fitted(tmp_path, *words.split())
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("log.csv --gpu a100 --name m --max-batch-tokens 9 --max-sequences 10", "above"),
        ("trace.csv --gpu a100 --name m", "has no column queued_s"),
    ],
)
def test_what_cannot_be_fitted_is_refused(tmp_path: Path, words: str, said: str) -> None:
    result = fitted(tmp_path, *words.split())
    assert isinstance(result.exception, InvalidInputError)
    assert said in str(result.exception)
