"""Tenuto where its laboratory is not installed: what a user plans and serves with, and what is said of the rest."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tenuto.plugins import ARRIVALS, LABORATORY, POLICIES, SCHEDULERS, VERBS

# Takes the distribution away as if it had never been installed: neither its modules nor its entry points are found.
WITHOUT = """
import sys
from importlib.metadata import MetadataPathFinder

class NoLaboratory:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tenuto_lab":
            raise ModuleNotFoundError(f"taken away: {name}", name=name)

found = MetadataPathFinder.find_distributions
MetadataPathFinder.find_distributions = lambda *given, **more: (
    each for each in found(*given, **more) if "tenuto_lab" not in (each.read_text("entry_points.txt") or "")
)
sys.meta_path.insert(0, NoLaboratory())
"""
WORKLOAD = """
models:
  - {name: resnet50, rate_rps: 100, slo_ms: 200}
  - {name: vgg19, rate_rps: 50, slo_ms: 250}
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)


OURS = sorted(set(entry_points(group=POLICIES).names) - LABORATORY[POLICIES])
# parvagpu wants GPUs that it may cut, and tenuto takes seconds.
CHEAP = [name for name in OURS if name not in ("parvagpu", "tenuto")]
WORKS = [
    "policies --json",
    *(f"plan w.yaml --policy {name} --gpus v100:2 -o {name}.yaml" for name in CHEAP),
    *(f"simulate symphony.yaml --scheduler {name} --duration-s 2" for name in ("deferred", "symphony", "eager")),
    "plan w.yaml --policy tenuto --option requests=200 --gpus v100:2 -o tenuto.yaml",
    "deploy --help",
    "serve --help",
    "--help",
]
MISSED = [
    *(f"simulate {name}.yaml --gpus v100:2 --duration-s 2" for name in sorted(LABORATORY[ARRIVALS])),
    *(f"plan w.yaml --gpus v100:2 --policy {name}" for name in sorted(LABORATORY[POLICIES])),
    *(f"simulate w.yaml --gpus v100:2 --scheduler {name}" for name in sorted(LABORATORY[SCHEDULERS])),
    *(f"{verb} list" for verb in sorted(LABORATORY[VERBS])),
]
UNKNOWN = {
    "plan w.yaml --gpus v100:2 --policy symphny": "Did you mean 'symphony'? Use one of gpulet, parvagpu",
    "simulate w.yaml --gpus v100:2 --scheduler fifo": "Use one of deferred, symphony, eager.",
    "sreve": "Did you mean 'serve'?",
}


Ran = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The exit code of each command, and what it printed, all in one process."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "w.yaml").write_text(WORKLOAD)
    for process in LABORATORY[ARRIVALS]:
        arrival = f"arrival: {{process: {process}, path: .}}"
        (folder / f"{process}.yaml").write_text(f"models: [{{name: vgg19, rate_rps: 1, slo_ms: 250, {arrival}}}]")
    program = f"""
import contextlib, io, json, shlex
from tenuto.cli import main
said = {{}}
for line in {[*WORKS, *MISSED, *UNKNOWN]!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as end:
            said[line] = (end.code, out.getvalue(), err.getvalue())
print(json.dumps(said))
"""
    done = run(folder, program)
    assert done.returncode == 0, done.stderr
    return {line: tuple(said) for line, said in json.loads(done.stdout).items()}


def test_every_policy_plans_and_every_scheduler_runs(ran: Ran) -> None:
    names = [policy["name"] for policy in json.loads(ran["policies --json"][1])["policies"]]
    assert sorted(names) == OURS
    assert "tenuto" in names
    assert [(line, ran[line][2]) for line in WORKS if ran[line][0] != 0] == []
    assert "experiment" not in ran["--help"][1]


def test_its_names_are_answered_with_the_cure(ran: Ran) -> None:
    for line in MISSED:
        code, out, err = ran[line]
        assert (line, code, out) == (line, 2, "")
        assert "pip install tenuto-lab" in err, line


def test_another_unknown_name_lists_the_known_ones(ran: Ran) -> None:
    for line, said in UNKNOWN.items():
        assert said in ran[line][2]


def test_what_serves_is_imported(tmp_path: Path) -> None:
    rooms = ("deployments.serve.config", "deployments.entry.gateway", "deployments.gpulet.replica")
    done = run(tmp_path, "".join(f"import tenuto.{room}\n" for room in rooms))
    assert (done.returncode, done.stderr) == (0, "")
