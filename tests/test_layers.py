"""The folders' direction: left never imports right, and planning needs neither Ray nor torch nor CUDA libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOUNDATION = ("documents", "errors", "options", "outcome")
ALLOWED = {
    "profiles": set(),
    "mps": set(),
    "placement": {"profiles"},
    "batching": {"profiles", "placement"},
    "deployments": {"profiles", "mps", "placement", "batching"},
    "loadgen": {"profiles", "placement", "batching", "deployments"},
}


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_left_never_imports_right(folder: str) -> None:
    wrong = []
    for file in (ROOT / folder).rglob("*.py"):
        for module in _imports(file):
            parts = module.split(".")
            if parts[0] != "tenuto" or len(parts) < 2 or parts[1] in (*FOUNDATION, folder):
                continue
            if parts[1] not in ALLOWED[folder]:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert wrong == []


@pytest.mark.parametrize(
    "modules",
    [
        "tenuto.profiles, tenuto.profiles.shipped, tenuto.profiles.networks.catalogue",
        "tenuto.placement, tenuto.placement.policies.ffd.ffd, tenuto.placement.policies.usher.usher",
        "tenuto.batching.core.deferred, tenuto.batching.virtual.simulator, tenuto.batching.virtual.goodput",
        "tenuto.loadgen.schedule, tenuto.placement.arrivals.processes, tenuto.loadgen.records, tenuto.loadgen.verdict",
        "tenuto.cli.plan, tenuto.cli.simulate, tenuto.cli.goodput, tenuto.cli.policies",
    ],
)
def test_planning_and_simulation_import_without_ray_torch_and_cuda(modules: str) -> None:
    program = f"""
import sys
BLOCKED = ("ray", "torch", "torchvision", "transformers", "pynvml", "fastapi", "sklearn", "PIL")
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Block())
import {modules}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
