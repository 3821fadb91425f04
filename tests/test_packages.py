"""What users install: the wheels that `scripts/wheel` builds, in environments that hold nothing they do not ask for."""

import ast
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tenuto.cli import BRINGS
from tenuto.deployments.serve.launcher import unused_port
from tests.instruments.empty_environment import EmptyEnvironment, asked_for
from tests.instruments.live import PATIENCE_S, infer

ROOT = Path(__file__).parents[1]
FOLDERS = ("batching", "deployments", "loadgen", "mps", "placement", "profiles", "tenuto")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LABORATORY = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text("utf-8"))["project"]
# What one of our requirements brings, and is spoken to in its terms: by whom.
BROUGHT = {
    "grpcio": "ray[serve]",
    "markupsafe": "jinja2",
    "pydantic-core": "pydantic",
    "requests": "opentelemetry-exporter-otlp-proto-http",
    "starlette": "fastapi",
    "sympy": "torch",
    "tokenizers": "transformers",
}
WORKLOAD = "models: [{name: m, rate_rps: 20, slo_ms: 500, latency: {alpha_ms: 1, beta_ms: 10}}]\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both wheels, built from a copy: the checkout stays as it is, and the environment is taken as it is."""
    copy = tmp_path_factory.mktemp("sources")
    for name in (*FOLDERS, "lab", "scripts", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    environment = copy / ".venv"
    environment.mkdir()
    for each in Path(sys.prefix).iterdir():
        if not each.name.startswith(".tenuto"):
            (environment / each.name).symlink_to(each)
    (environment / ".tenuto-serve,test").touch()
    subprocess.run(["scripts/wheel", "--pure", "built"], cwd=copy, check=True)
    return sorted((copy / "built").glob("*.whl"))


def test_the_wheels_hold_every_file_of_the_packages(wheels: list[Path]) -> None:
    """Templates, profiles and rules for Prometheus too, and nothing that is not below a package of ours."""
    laboratory, tenuto = ({Path(name) for name in zipfile.ZipFile(wheel).namelist()} for wheel in reversed(wheels))
    assert {name for name in tenuto if not name.parts[0].startswith("tenuto-")} == set(_files_of(ROOT, FOLDERS))
    assert all(any(name.match("*.dist-info/licenses/LICENSE") for name in wheel) for wheel in (tenuto, laboratory))
    packages = {name for name in laboratory if not name.parts[0].startswith("tenuto_lab-")}
    assert packages == set(_files_of(ROOT / "lab", ("tenuto_lab",)))


def _files_of(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    """Every file below the packages, by where it is installed."""
    for folder in folders:
        for file in (root / folder).rglob("*"):
            inside = file.relative_to(root)
            is_linked = folder == "tenuto" and (ROOT / "tenuto" / inside.parts[1]).is_symlink()
            if file.is_file() and "__pycache__" not in inside.parts and not is_linked:
                yield inside if folder.startswith("tenuto") else Path("tenuto") / inside


def test_every_library_that_is_imported_is_asked_for() -> None:
    """Imports inside of functions too, which no other test may reach."""
    machine = {canonicalize_name(each.name) for each in _requirements(PROJECT)}
    assert {Requirement(by).name for by in BROUGHT.values()} <= machine
    brought = {name for name, by in BROUGHT.items() if name in asked_for([by], [], known={})}
    assert brought == set(BROUGHT)
    laboratory = {canonicalize_name(each.name) for each in _requirements(LABORATORY)}
    for root, folders, asked in (
        (ROOT, FOLDERS, machine | brought),
        (ROOT / "lab", ("tenuto_lab",), machine | brought | laboratory),
    ):
        files = [file for folder in folders for file in (root / folder).rglob("*.py")]
        imported = {(module, str(file.relative_to(root))) for file in files for module in _imported(file)}
        assert {each for each in imported if not asked & _distributions_of(each[0])} == set()


def test_a_command_names_what_brings_a_module_that_it_misses() -> None:
    """Of every module that some file imports and that planning does without."""
    always = {canonicalize_name(name) for name in asked_for(PROJECT["dependencies"], [], known={})}
    trees = ((ROOT, FOLDERS), (ROOT / "lab", ("tenuto_lab",)))
    files = [file for root, folders in trees for folder in folders for file in (root / folder).rglob("*.py")]
    imported = {module for file in files for module in _imported(file) if not _distributions_of(module) & always}
    named = {module: wanted for wanted, modules in BRINGS.items() for module in modules.split()}
    assert imported - named.keys() == set()
    brought_by = {wanted: _brought_by(wanted) | {wanted} for wanted in BRINGS}
    for module, wanted in named.items():
        assert _distributions_of(module) & brought_by[wanted], f"{wanted} does not bring {module}"


def _brought_by(wanted: str) -> set[str]:
    """The libraries that a command's cure for a missing one installs."""
    extra = wanted.partition("[")[2].rstrip("]")
    direct = _requirements(PROJECT, extra) if extra else _requirements(LABORATORY)
    return {canonicalize_name(name) for name in (*asked_for([wanted], [], known={}), *(each.name for each in direct))}


def _distributions_of(module: str) -> set[str]:
    return {canonicalize_name(name) for name in _distributions().get(module, [module])}


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


@cache
def _imported(file: Path) -> set[str]:
    """The libraries of others that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found - sys.stdlib_module_names - {"tenuto", "tenuto_lab", "__future__"}


def _requirements(project: dict[str, object], *extras: str) -> list[Requirement]:
    """What a project asks for, with all of its extras but those of tests where none is named."""
    optional = project.get("optional-dependencies", {})
    assert isinstance(optional, dict)
    chosen = extras or tuple(name for name in optional if name != "test")
    texts = [*project["dependencies"], *(text for extra in chosen for text in optional[extra])]  # type: ignore[misc]
    return [Requirement(text) for text in texts]


def test_the_lock_has_a_version_within_the_range_of_everything_that_is_asked_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    locked = {canonicalize_name(name): number for name, number in (line.split("==") for line in lines)}
    asked = [*_requirements(PROJECT), *_requirements(PROJECT, "test"), *_requirements(LABORATORY)]
    outside = [
        str(each)
        for each in asked
        if each.name not in ("tenuto", "vllm")  # vLLM has an environment of its own, as it pins others of these
        and not each.specifier.contains(locked.get(canonicalize_name(each.name), "0"))
    ]
    assert outside == []
    assert locked["torch"] in (ROOT / "scripts" / "environment").read_text("utf-8")


def test_the_lock_installs_on_every_python_that_tenuto_runs_on() -> None:
    """Debian 12 has 3.11.2. A version that asks for 3.11.5 made pip search for minutes there, and fail."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    too_new = {
        f"{each.name}=={each.version}": each.metadata["Requires-Python"]
        for each in distributions()
        if locked.get(each.name.lower()) == each.version and not _runs_on_the_first(each.metadata["Requires-Python"])
    }
    assert too_new == {}


def _runs_on_the_first(requires_python: str | None) -> bool:
    return requires_python is None or SpecifierSet(requires_python).contains("3.11.0")


def test_a_version_is_in_the_changelog() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert heads[0] == PROJECT["version"] == version("tenuto")
    assert LABORATORY["version"] == PROJECT["version"]


def test_planning_and_simulating_need_nothing_but_tenuto(wheels: list[Path], tmp_path: Path) -> None:
    environment = EmptyEnvironment(tmp_path / "environment", [wheels[0]])
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    for line in (
        "tenuto --version",
        "tenuto policies",
        "tenuto plan workload.yaml --policy gpulet --gpus v100:1 -o plan.yaml --picture plan.svg",
        "tenuto simulate plan.yaml --duration-s 2 -o report",
        "tenuto doctor --help",
    ):
        done = environment.run(*line.split(), folder=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
    assert (tmp_path / "plan.svg").exists()
    without = environment.run("tenuto", "serve", "plan.yaml", folder=tmp_path)
    assert without.returncode == 3
    assert "pip install 'tenuto[serve]'" in without.stderr


def test_the_laboratory_adds_its_names(wheels: list[Path], tmp_path: Path) -> None:
    environment = EmptyEnvironment(tmp_path / "environment", wheels)
    policies = environment.run("tenuto", "policies", "--json", folder=tmp_path)
    assert set(LABORATORY["entry-points"]["tenuto.policies"]) <= {
        each["name"] for each in json.loads(policies.stdout)["policies"]
    }
    done = environment.run("tenuto", "experiment", "list", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.ray
@pytest.mark.night
def test_an_installed_tenuto_serves(wheels: list[Path], tmp_path: Path) -> None:
    environment = EmptyEnvironment(tmp_path / "environment", [wheels[0]], ["serve"])
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    words = ["tenuto", "plan", "workload.yaml", "--policy", "gpulet", "--gpus", "v100:1", "-o", "plan.yaml"]
    planned = environment.run(*words, folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    port, folder = unused_port(), tempfile.mkdtemp(prefix="r")  # short enough for sockets
    alone = environment.environment(RAY_TMPDIR=folder, RAY_ADDRESS="local")
    ports = "--port", str(port), "--operator-port", str(unused_port())
    serve = [environment.bin / "tenuto", "serve", "plan.yaml", "--emulate", *ports]
    process = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=alone)
    try:
        assert process.stderr is not None
        said = []
        while "serving at" not in "".join(said[-1:]):
            said.append(process.stderr.readline())
            assert said[-1], said  # it has ended
        assert infer(f"http://127.0.0.1:{port}", "m")[0] == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 0, err
