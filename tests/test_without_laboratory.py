"""Tenuto where its laboratory is not installed: what a user plans and serves with, and what is said of the rest."""

import json
import subprocess
import sys
from pathlib import Path

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
    distribution for distribution in found(*given, **more) if distribution.metadata["Name"] != "tenuto-lab"
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


def commands(folder: Path, *lines: str) -> list[tuple[int, str, str]]:
    """Run commands in one process; return the exit code and what each printed."""
    program = f"""
import contextlib, io, json, shlex
from tenuto.cli import main
said = []
for line in {list(lines)!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as end:
            said.append((end.code, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""
    done = run(folder, program)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def test_every_policy_plans_and_every_scheduler_runs(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    ((code, listed, _),) = commands(tmp_path, "policies --json")
    names = [policy["name"] for policy in json.loads(listed)["policies"]]
    assert code == 0
    assert "tenuto" in names
    assert not set(names) & LABORATORY[POLICIES]
    # igniter wants coefficients, parvagpu GPUs that it may cut, and tenuto takes seconds.
    cheap = [name for name in names if name not in ("igniter", "parvagpu", "tenuto")]
    ran = commands(
        tmp_path,
        *(f"plan w.yaml --policy {name} --gpus v100:2 -o {name}.yaml" for name in cheap),
        *(f"simulate usher.yaml --scheduler {name} --duration-s 2" for name in ("deferred", "symphony", "eager")),
        "plan w.yaml --policy tenuto --option requests=200 --gpus v100:2 -o tenuto.yaml",
        "deploy --help",
        "serve --help",
        "--help",
    )
    assert [(code, err) for code, _, err in ran if code != 0] == []
    assert "experiment" not in ran[-1][1]


def test_its_names_are_answered_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    for process in LABORATORY[ARRIVALS]:
        arrival = f"arrival: {{process: {process}, path: .}}"
        (tmp_path / f"{process}.yaml").write_text(f"models: [{{name: vgg19, rate_rps: 1, slo_ms: 250, {arrival}}}]")
    asked = [
        *(f"simulate {name}.yaml --gpus v100:2 --duration-s 2" for name in sorted(LABORATORY[ARRIVALS])),
        *(f"plan w.yaml --gpus v100:2 --policy {name}" for name in sorted(LABORATORY[POLICIES])),
        *(f"simulate w.yaml --gpus v100:2 --scheduler {name}" for name in sorted(LABORATORY[SCHEDULERS])),
        *(f"{verb} list" for verb in sorted(LABORATORY[VERBS])),
    ]
    for line, (code, out, err) in zip(asked, commands(tmp_path, *asked), strict=True):
        assert (line, code, out) == (line, 2, "")
        assert "pip install tenuto-lab" in err, line


def test_another_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    policy, scheduler, verb = commands(
        tmp_path, "plan w.yaml --gpus v100:2 --policy ushr", "simulate w.yaml --gpus v100:2 --scheduler fifo", "sreve"
    )
    assert "Did you mean 'usher'? Use one of ao-milp, gpulet" in policy[2]
    assert "Use one of deferred, symphony, eager." in scheduler[2]
    assert "Did you mean 'serve'?" in verb[2]


def test_what_serves_is_imported(tmp_path: Path) -> None:
    rooms = ("deployments.serve.config", "deployments.entry.gateway", "deployments.gpulet.replica")
    done = run(tmp_path, "".join(f"import tenuto.{room}\n" for room in rooms))
    assert (done.returncode, done.stderr) == (0, "")
