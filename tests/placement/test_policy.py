"""How policies are found and configured; the policy of docs/guide/your-policy.md by file and by entry point."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import load_policy, policy_names, solve
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tests.placement.published import equal_rates, placed, thesis, v100s

DOCUMENT = Path(__file__).parents[2] / "docs" / "guide" / "your-policy.md"
OURS = ("tenuto", "symphony", "gpulet", "parvagpu")


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code is not None
    path = tmp_path / "my_policies.py"
    path.write_text(code.group(1))
    return path


def test_the_documented_policy_runs_from_its_file(documented: Path) -> None:
    policy = load_policy(f"{documented}:OneEach", {"part_of_slo": "0.4"})
    plan = solve(policy, equal_rates(["resnet50", "bert", "xlnet"], 50, 200), v100s(3), thesis())
    assert plan.policy.name == "one-each"
    assert plan.policy.options == {"part_of_slo": 0.4}
    assert set(placed(plan)) == {"resnet50", "bert"}
    assert plan.unserved_reasons == {"xlnet": "no GPU left, or too slow"}
    assert len(documented.read_text().split("\n")) <= 35


def test_the_documented_policy_runs_from_a_users_package(documented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = re.search(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert toml is not None
    name, target = re.search(r'^(\S+) = "(.*)"$', toml.group(1), re.MULTILINE).groups()  # type: ignore[union-attr]
    info = documented.parent / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tenuto.policies]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(documented.parent))
    policy = load_policy(name)
    assert policy.name == "one-each"
    assert name in policy_names()
    sys.modules.pop("my_policies", None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import not_installed_here", "importing lacking:Policy failed: .*'not_installed_here'"),
        ("from lacking.parts import Policy", "importing lacking:Policy failed: .*'lacking.parts'"),
        ("1 / 0", "importing lacking:Policy failed: ZeroDivisionError"),
        (None, "unknown policy"),
    ],
)
def test_a_registered_policy_that_cannot_be_imported_says_why(
    source: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / "lacking.py").write_text(f"{source}\n")
    info = tmp_path / "lacking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lacking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tenuto.policies]\nlacking = lacking:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInputError, match=words):
        load_policy("lacking")
    if source is None:  # as after half an upgrade
        assert "lacking" not in policy_names()
    else:
        with pytest.raises(InvalidInputError, match=words):
            policy_names()


def test_every_policy_has_a_line_and_a_source() -> None:
    known = policy_names()
    assert set(OURS) <= set(known)
    for name, kind in known.items():
        assert kind.name == name
        assert kind.summary
        assert "\n" not in kind.summary
        assert kind.source


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'symphony'"):
        load_policy("symphny")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py:X", "no such file"),
        ("{dir}/bad.py:X", "importing it failed: ZeroDivisionError"),
        ("{dir}/empty.py:X", "is not a policy"),
        ("{dir}/text.txt:X", "not a Python file"),
        ("no_such.module:X", "importing it failed: ModuleNotFoundError"),
        ("tenuto.placement.policy:DEFAULT_POLICY", "is not a policy"),
    ],
)
def test_files_that_hold_no_policy_are_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("X = 3\n")
    (tmp_path / "text.txt").write_text("hello\n")
    with pytest.raises(InvalidInputError, match=words):
        load_policy(name.format(dir=tmp_path))


def test_a_policy_is_found_in_a_module_and_beside_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_policy("tenuto.placement.policies.gpulet.gpulet:GpuletPolicy", {"max_batch": "16"})
    assert (type(found), found.options) == (GpuletPolicy, {"max_batch": 16})
    source = (
        "from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy\n\n\nclass Mine(GpuletPolicy):\n    pass\n"
    )
    (tmp_path / "beside_the_workload.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert type(load_policy("beside_the_workload:Mine")).__name__ == "Mine"


def test_options_are_converted_to_the_type_of_the_default() -> None:
    policy = load_policy("gpulet", {"max_batch": "16"})
    assert isinstance(policy, GpuletPolicy)
    assert policy.options == {"max_batch": 16}
    assert load_policy("tenuto", {"requests": "2", "starts": "ffd"}).options == {"requests": 2, "starts": ("ffd",)}
    assert load_policy("gpulet", {"merge_without_free": "yes"}).options == {"merge_without_free": True}


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_policy("gpulet", {"shares_pct": "1", "max_batch": "x", "merge_without_free": "perhaps"})
    assert sorted(problem.path for problem in caught.value.problems) == [
        "--option max_batch",
        "--option merge_without_free",
        "--option shares_pct",
    ]


@pytest.mark.parametrize(
    ("policy", "option", "value", "words"),
    [
        ("tenuto", "requests", "two", "must be a whole number. The default is 8000"),
        ("symphony", "time_limit_s", "nan", "must be a number. The default is"),
        ("tenuto", "attainment", "nan", "must be a number. The default is 0.99"),
        ("gpulet", "shares", "20,nan", "must be a list separated by commas. The default is 20.0,40.0"),
        ("sbp", "halves", "maybe", "must be true or false"),
    ],
)
def test_an_option_of_another_type_is_refused_with_what_it_takes(
    policy: str, option: str, value: str, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        load_policy(policy, {option: value})
