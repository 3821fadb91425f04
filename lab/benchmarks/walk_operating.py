"""Walk the way that lab/journal/faults.md shows, from the first deploy to the delete on a real Ray of two nodes, with
emulated GPUs, and print every command with its output.

    python lab/benchmarks/walk_operating.py

A first plan, a bad one, a larger one, a rollback, a GPU that is drained, a rate that grows, models that come and go, a
node that is lost, the end. Requests come all the while from this process, and are counted at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from bench_operating import HEAD, WORKER, Load, controller_answers, shown, two_nodes, until
from scenes import print_machine

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.serve.launcher import unused_port

WORKLOAD = """
models:
  - {name: faces, rate_rps: 20, slo_ms: 500, latency: {alpha_ms: 4, beta_ms: 20}}
  - {name: cars, rate_rps: 10, slo_ms: 500, latency: {alpha_ms: 10, beta_ms: 20}}
"""
LARGER = """
models:
  - {name: faces, rate_rps: 60, slo_ms: 500, latency: {alpha_ms: 4, beta_ms: 20}}
  - {name: cars, rate_rps: 10, slo_ms: 500, latency: {alpha_ms: 10, beta_ms: 20}}
"""
CLUSTER = f"""
nodes:
  - {{name: left, address: {HEAD}, gpus: [{{type: v100, count: 2}}]}}
  - {{name: right, address: {WORKER}, gpus: [{{type: v100, count: 2}}]}}
"""
CONTROL = "mode: act\npolicy: {name: gpulet}\n"
PROFILES = ("--cluster", "cluster.yaml", "--profiles", "igniter-v100")


class Walk:
    """Runs commands in a folder and prints them with their output."""

    def __init__(self, folder: Path, address: str, operator: Operations) -> None:
        self._folder, self._operator = folder, operator
        self._environment = {
            **os.environ,
            "RAY_ADDRESS": address,
            "COLUMNS": "140",
            "NO_COLOR": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, command: str) -> str:
        """Run a command line of ours, print it with its output and its exit code where that is not 0."""
        done = subprocess.run(
            command, shell=True, env=self._environment, cwd=self._folder, capture_output=True, text=True, timeout=200
        )
        lines = (done.stderr + done.stdout).splitlines()
        told = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines if "INFO" not in line]
        print(f"$ {command}", *told, *([f"(exit code {done.returncode})"] if done.returncode else []), sep="\n")
        sys.stdout.flush()
        return done.stdout

    def until_logged(self, word: str, timeout_s: float) -> None:
        """Wait until the controller's log has an entry with this in it; not by a command, which takes seconds."""

        def is_there() -> bool:
            lines = self._operator.controller().log(50)
            return any(word in f"{line.kind}: {line.text}" for line in lines)

        until(is_there, timeout_s)


def main() -> None:
    """Do it."""
    print_machine()
    port = unused_port()
    temporary = tempfile.TemporaryDirectory()
    with temporary as name, two_nodes() as nodes, Operations(None, lambda _text: None) as operator:
        folder = Path(name)
        for file, text in (
            ("workload.yaml", WORKLOAD),
            ("larger.yaml", LARGER),
            ("cluster.yaml", CLUSTER),
            ("control.yaml", CONTROL),
        ):
            (folder / file).write_text(text.lstrip())
        walk = Walk(folder, nodes.address, operator)
        for source, plan in (("workload", "plan"), ("larger", "larger-plan")):
            walk.run(f"tenuto plan {source}.yaml --policy gpulet {' '.join(PROFILES)} -o {plan}.yaml")
        walk.run(
            f"tenuto deploy plan.yaml --emulate --port {port} --gateways 2 --control control.yaml {' '.join(PROFILES)} "
            "--why 'the first'"
        )
        until(lambda: controller_answers(operator))
        walk.run("tenuto control status")
        with Load(port, {"faces": 20.0, "cars": 10.0}) as load:
            _while_it_serves(walk, folder, port, load, nodes)
            counts = load.counts()
        print(f"# {sum(counts.values())} requests all the while: {shown(counts)}")
        walk.run("tenuto delete --yes")


def _while_it_serves(walk: Walk, folder: Path, port: int, load: Load, nodes: object) -> None:
    bad = yaml.safe_load((folder / "plan.yaml").read_text())
    text = yaml.safe_dump(bad)
    (folder / "bad.yaml").write_text(re.sub(r"share_pct: \S+", "share_pct: 120", text))
    walk.run("tenuto deploy bad.yaml")
    walk.run("tenuto diff larger-plan.yaml")
    walk.run("tenuto deploy larger-plan.yaml --why 'faces will have more load'")
    walk.run("tenuto rollback")
    walk.run("tenuto drain left/0")
    walk.run("tenuto status")
    walk.run("tenuto undrain left/0")
    load.rates["cars"] *= 10.0
    walk.until_logged("changed: too few", 40.0)
    walk.run("tenuto control log --limit 2")
    load.rates["cars"] /= 10.0
    walk.run("tenuto model add '{name: plates, rate_rps: 10, slo_ms: 300, latency: {alpha_ms: 4, beta_ms: 20}}'")
    walk.until_logged("changed: the workload changed (plates)", 40.0)
    walk.run("tenuto model remove plates")
    time.sleep(5.0)
    walk.run("tenuto control log --limit 4")
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)  # type: ignore[attr-defined]
    time.sleep(15.0)
    walk.run("tenuto control log --limit 3")
    walk.run(f"tenuto status --url http://127.0.0.1:{port}")
    walk.run("tenuto history")


if __name__ == "__main__":
    main()
