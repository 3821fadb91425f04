"""The public names: each can be imported, is listed, and loads nothing but its own room."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenuto

ROOT = Path(__file__).parents[1]
FOLDERS = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")


def _product() -> Iterator[Path]:
    """Every file of the product, each once: the folders are linked below tenuto/ too."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT)
            if folder != "tenuto" or not (ROOT / "tenuto" / inside.parts[1]).is_symlink():
                yield inside


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(set)
    for file in _product():
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_file_name_means_one_thing() -> None:
    """Verbs of the command line are called as what they do."""
    places = defaultdict(set)
    for file in _product():
        if file.name != "__init__.py" and file.parts[:2] != ("tenuto", "cli"):
            places[file.name].add(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_every_public_name_is_there_and_in_order() -> None:
    assert list(tenuto.__all__) == sorted(tenuto.__all__, key=lambda name: (name[0].islower(), name))
    for name in tenuto.__all__:
        assert getattr(tenuto, name).__name__
    assert set(tenuto.__all__) <= set(dir(tenuto))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Plann'"):
        _ = tenuto.Plann


@pytest.mark.parametrize(
    "steps",
    [
        (
            ("import tenuto", ("tenuto.placement", "tenuto.profiles", "pydantic")),
            ("from tenuto import Workload", ("tenuto.batching", "tenuto.deployments", "tenuto.loadgen")),
            ("import tenuto.placement", ("tenuto.batching", "tenuto.deployments", "tenuto.loadgen")),
            ("from tenuto import simulate", ("tenuto.deployments", "tenuto.loadgen", "ray", "torch")),
        ),
        # Each is a process of its own, many on one machine: scipy alone is 40 MiB and half a second.
        (
            ("import tenuto.deployments.entry.service.hook_process", ("tenuto.placement", "tenuto.loadgen")),
            ("import tenuto.deployments.gpulet.replica, tenuto.deployments.entry.gateway", ("ray", "torch", "scipy")),
        ),
    ],
)
def test_an_import_loads_no_other_room(steps: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """One process takes the steps in order: what a step must not have loaded, none before it may have either."""
    program = "import sys\n" + "".join(
        f"{statement}\nprint([m for m in {absent!r} if m in sys.modules])\n" for statement, absent in steps
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout.split(), done.stderr) == (["[]"] * len(steps), "")
