"""A gpu-let may lie on several GPUs: whoever asks what lies on a GPU counts it on each.

The code asks `Plan.on_gpu`, `Plan.by_gpu`, `Plan.used_gpus` or `Gpulet.gpus`. Reading a gpu-let's first GPU alone is
right only where this says why.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("placement", "batching", "deployments", "loadgen", "tenuto/cli")
NAMES = {"gpulet", "g", "planned", "start", "host", "changed", "merged", "after", "before", "standby", "larger"}

# Functions that read the first GPU of a gpu-let.
TYPE = "its GPUs have one type"
NAME = "its id, order or row is that of its first GPU"
SINGLE = "only gpu-lets of batches come here, which lie on one GPU"
ALL = "the others stand beside it"
KNOWN = {
    ("placement/merging.py", "merge"): SINGLE,
    ("placement/merging.py", "_apart_rps"): SINGLE,
    ("placement/merging.py", "_program"): SINGLE,
    ("placement/planner/gpu_slices.py", "in_place"): SINGLE,
    ("placement/planner/candidates.py", "_beside"): SINGLE,
    ("placement/planner/minimal_change.py", "_spared"): TYPE,
    ("placement/planner/mixed_workloads.py", "_with_assumptions"): TYPE,
    ("placement/planner/mixed_workloads.py", "_joined"): NAME,
    ("placement/planner/completion.py", "_measured_otherwise_than_here"): TYPE,
    ("placement/planner/completion.py", "_estimated"): TYPE,
    ("placement/planner/completion.py", "_circumstances"): SINGLE,
    ("placement/planner/completion.py", "check_plan"): TYPE,
    ("placement/explaining.py", "_replica"): TYPE,
    ("placement/rules.py", "_reference_problems"): ALL,
    ("placement/rules.py", "_together_problems"): TYPE,
    ("placement/plan.py", "processes"): NAME,
    ("placement/shown/table.py", "rows_of"): NAME,
    ("placement/planner/replica_placement.py", "_apart"): NAME,
    ("placement/planner/replica_placement.py", "_with"): NAME,
    ("batching/core/build.py", "from_plan"): ALL,
    ("batching/planning/starts.py", "place"): SINGLE,
    ("deployments/operator/exposition.py", "_gpus"): ALL,
    ("placement/planner/standby.py", "twins"): SINGLE,
    ("placement/planner/standby.py", "still_fitting"): SINGLE,
    ("placement/planner/standby.py", "_ways"): SINGLE,
    ("placement/planner/gpu_matching.py", "match_to_running"): NAME,
    ("placement/planner/gpu_matching.py", "renamed"): NAME,
    ("placement/planner/batch_growth.py", "enlarge_batches"): SINGLE,
    ("placement/planner/candidates.py", "_in_place_of_others"): SINGLE,
    ("deployments/dispatch/fleet.py", "descriptions"): ALL,
    ("deployments/entry/service/dispatcher_client.py", "gpulets"): ALL,
    ("tenuto/cli/live_picture.py", "_notes"): ALL,
}


def _reads() -> set[tuple[str, str]]:
    """Return module and function of every place that reads `.gpu` of a gpu-let."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                is_read = isinstance(node, ast.Attribute) and node.attr == "gpu" and isinstance(node.ctx, ast.Load)
                if is_read and isinstance(node.value, ast.Name | ast.Attribute):
                    of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                    if of in NAMES:
                        found.add((name, function.name))
    return found


def test_the_first_gpu_of_a_gpulet_is_read_alone_only_where_that_is_right() -> None:
    unknown = _reads() - KNOWN.keys()
    assert not unknown, f"{sorted(unknown)}: count all GPUs of a gpu-let, or say in KNOWN why the first will do"


def test_what_is_known_is_still_read() -> None:
    assert not KNOWN.keys() - _reads()
