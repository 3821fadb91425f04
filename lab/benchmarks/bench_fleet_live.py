"""Two cells on this machine, each a Ray of its own with emulated GPUs, behind HAProxy with the configuration of
`tenuto fleet plan`, under a steady load: one cell is upgraded, one drained, one killed. Prints what was lost.

    python lab/benchmarks/bench_fleet_live.py [--events killed] [--seed 1] [--seconds 10]

Every step goes by the commands that docs/guide/fleet.md shows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray  # noqa: F401, it brings psutil
import yaml
from bench_operating import Load, shown, until
from scenes import print_machine

from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import unused_port
from tenuto.errors import EnvironmentFaultError

import psutil  # isort: skip

CELLS = ("east", "west")
EVENTS = ("upgraded", "drained", "killed")
RATES = {"faces": 30.0, "cars": 10.0}


def workload(faces_rps: float) -> str:
    """Return a workload with one model that survives the loss of a cell, and one that needs no second cell."""
    latency = {"alpha_ms": 2, "beta_ms": 10}
    faces = {"name": "faces", "rate_rps": faces_rps, "slo_ms": 500, "latency": latency, "spread": "cell", "survive": 1}
    cars = {"name": "cars", "rate_rps": 20, "slo_ms": 500, "latency": latency, "spread": "cell", "survive": 1}
    return yaml.safe_dump({"models": [faces, cars]})


class Fleet:
    """Two cells in a folder, and HAProxy in front of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.front = folder, unused_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        cells = []
        self._ray = {name: folder / name[0] for name in CELLS}  # short enough for sockets
        self._ports = {name: unused_port() for name in CELLS}
        self._operators = {name: unused_port() for name in CELLS}
        for name in CELLS:
            self._ray[name].mkdir()
            url, operator_url = (f"http://127.0.0.1:{ports[name]}" for ports in (self._ports, self._operators))
            nodes = [{"name": "n0", "gpus": [{"type": "v100", "count": 2}]}]
            cells.append({"name": name, "url": url, "operator_url": operator_url, "nodes": nodes})
        (folder / "fleet.yaml").write_text(yaml.safe_dump({"cells": cells}), encoding="utf-8")

    def _words(self, words: str) -> list[str]:
        return [str(Path(sys.executable).parent / "tenuto"), *words.split()]

    def _environment(self, cell: str | None) -> dict[str, str]:
        others = {} if cell is None else {"RAY_TMPDIR": str(self._ray[cell])}
        return {**os.environ, "RAY_AUTH_MODE": "", "NO_COLOR": "1", "COLUMNS": "120", **others}

    def run(self, words: str, cell: str | None = None) -> int:
        """Run a command of ours, on the Ray of a cell where one is named; print it with its output."""
        done = subprocess.run(
            self._words(words),
            env=self._environment(cell),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("wrote ")]
        print(f"$ tenuto {words}", *lines, *([f"(exit code {done.returncode})"] if done.returncode else []), sep="\n")
        return done.returncode

    def plan(self, faces_rps: float, *words: str) -> None:
        """Write the next step from what runs."""
        (self.folder / "workload.yaml").write_text(workload(faces_rps), encoding="utf-8")
        self.run(" ".join(("fleet plan workload.yaml fleet.yaml -o step", "--bind", f"127.0.0.1:{self.front}", *words)))

    def changes(self) -> dict[str, str]:
        """Return the files of the plans that the step changes, by cell, in its order."""
        step = yaml.safe_load((self.folder / "step/step.yaml").read_text(encoding="utf-8"))
        return {change["cell"]: f"step/{change['file']}" for change in step["changes"]}

    def serve(self, cell: str, plan: str) -> None:
        """Start a cell."""
        ports = f"--port {self._ports[cell]} --proxy-port {unused_port()} --operator-port {self._operators[cell]}"
        with (self.folder / f"{cell}.log").open("wb") as log:
            self.processes[cell] = subprocess.Popen(
                self._words(f"serve {plan} --emulate {ports}"),
                env={**self._environment(cell), "RAY_ADDRESS": "local"},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def is_ready(self, cell: str) -> bool:
        """Say whether it serves."""
        try:
            return bool(get_json(f"http://127.0.0.1:{self._ports[cell]}/v2/health/ready", 2.0).get("ready"))
        except EnvironmentFaultError:
            return False

    def give_weights(self, program: str) -> None:
        """Start HAProxy with the weights of the step, or let it take them in."""
        file = self.folder / "step/haproxy.cfg"
        if "front" in self.processes:
            self.processes["front"].send_signal(signal.SIGUSR2)
        else:
            self.processes["front"] = subprocess.Popen([program, "-W", "-db", "-f", str(file)])
        step = yaml.safe_load((self.folder / "step/step.yaml").read_text(encoding="utf-8"))["id"]
        print(f"HAProxy has the weights after {until(lambda: self._step_in_force() == step):.1f} s")

    def _step_in_force(self) -> str:
        done = subprocess.run(
            ["curl", "-s", f"http://127.0.0.1:{self.front}/fleet/step"], capture_output=True, text=True, timeout=10
        )
        return done.stdout

    def kill(self, cell: str) -> None:
        """Kill all of a cell at once, as the loss of its machines does."""
        below = psutil.Process(self.processes[cell].pid).children(recursive=True)
        for process in [psutil.Process(self.processes[cell].pid), *below]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.processes.pop(cell).wait()


@contextmanager
def two_cells() -> Iterator[Fleet]:
    """A fleet that has nothing running yet; all that it starts ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="f"))
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        for name in [*fleet.processes]:
            fleet.kill(name)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of load before and after each event")
    arguments = parser.parse_args()
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise SystemExit("no HAProxy on this machine (Debian: apt install haproxy)")
    print_machine()
    with two_cells() as fleet:
        play(fleet, program, arguments.events, arguments.seed, arguments.seconds)


def play(
    fleet: Fleet, program: str, events: Sequence[str], seed: int, around_s: float
) -> dict[str, tuple[Counter[str], int]]:
    """Bring up a fleet, and let each event happen under load. Return by event what came back, and the exit code of
    `tenuto fleet check` after it."""
    results: dict[str, tuple[Counter[str], int]] = {}
    fleet.plan(60.0)
    for cell, plan in fleet.changes().items():
        fleet.serve(cell, plan)
    print(f"both serve after {until(lambda: all(map(fleet.is_ready, CELLS))):.0f} s")
    fleet.give_weights(program)
    fleet.run(f"fleet check step --front http://127.0.0.1:{fleet.front}")
    fleet.run("fleet observe -o fleet.yaml")

    @contextmanager
    def under_load(what: str) -> Iterator[None]:
        with Load(fleet.front, RATES, seed=seed) as load:
            time.sleep(around_s)
            yield
            time.sleep(around_s)
        counts = load.counts()
        print(f"# {what}: {sum(counts.values())} requests: {shown(counts)}", flush=True)
        results[what] = counts, -1

    if "upgraded" in events:
        with under_load("upgraded"):
            fleet.plan(90.0)
            fleet.run("fleet diff step")
            for cell, plan in fleet.changes().items():
                fleet.run(f"deploy {plan} --yes", cell)
                fleet.run("fleet check step")
            fleet.give_weights(program)
        results["upgraded"] = results["upgraded"][0], fleet.run("fleet check step")
        fleet.run("fleet observe -o fleet.yaml")
    if "drained" in events:
        with under_load("drained"):
            fleet.plan(90.0, "--without east")
            fleet.give_weights(program)
            time.sleep(2.0)
            fleet.processes["east"].send_signal(signal.SIGTERM)
            fleet.processes.pop("east").wait()
        results["drained"] = results["drained"][0], fleet.run("fleet check step")
        fleet.serve("east", "east.plan.json")
        until(lambda: fleet.is_ready("east"))
        fleet.run("fleet observe -o fleet.yaml")
        fleet.plan(90.0)
        fleet.give_weights(program)
    if "killed" in events:
        with under_load("killed"):
            fleet.kill("west")
        fleet.run("fleet observe -o fleet.yaml")
        results["killed"] = results["killed"][0], fleet.run("fleet check step")
    return results


if __name__ == "__main__":
    main()
