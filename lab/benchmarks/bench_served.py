"""The served path beside its floor (`floor/`: the same scheduler in the plainest server, no Ray) and beside Triton
(`triton_rival`): share in time below, at and beyond capacity, quiet and beside a busy program; recovery after overload;
cold starts; closed loop.

Open loop, Poisson, latency from the scheduled time, one client process, everything on this machine. GPUs are emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from serving import heading, synthetic_plan
from triton_rival import SETTINGS, WHEEL, installed
from triton_rival import triton as triton_server

from tenuto.deployments.control.operations import begin
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan

FLOOR = Path(__file__).parent / "floor"
_SERVING = (
    b"ray::",
    b"raylet",
    b"gcs_server",
    b"haproxy",
    b"floor/server",
    b"floor/gpulet",
    b"tenuto.deployments",
    b"tritonserver",
    b"triton_python_backend_stub",
)
LOAD = [sys.executable, str(FLOOR / "load.py")]


class Row(NamedTuple):
    """A model l(b) = alpha b + beta on so many GPUs, and the rates that it is asked at; the last is far beyond."""

    name: str
    gpus: int
    alpha_ms: float
    beta_ms: float
    slo_ms: float
    rates: tuple[float, ...]
    picture: str = ""  # the type of 3 x 224 x 224 values, in place of one number

    def plan(self) -> Plan:
        """Return the plan of our own server."""
        largest = min(512, int((self.slo_ms - self.beta_ms) / self.alpha_ms))
        return synthetic_plan(
            self.alpha_ms, self.beta_ms, self.slo_ms, self.rates[0], self.gpus, largest, _picture_model(self.picture)
        )


def _picture_model(picture: str) -> dict[str, Any] | None:
    if not picture:
        return None
    taken = {"name": "INPUT0", "dtype": "float32", "shape": [3, 224, 224], "accepts": ["uint8"]}
    return {"inputs": [taken], "outputs": [{"name": "OUTPUT0", "dtype": "float32", "shape": [1]}]}


ROWS = {
    "25": Row("SLO 25 ms, 2 GPUs", 2, 1.053, 5.072, 25.0, (300, 600, 750, 850, 900, 1498, 3000)),
    "100": Row("SLO 100 ms, 4 GPUs", 4, 4.212, 20.288, 100.0, (300, 500, 570, 600, 749, 1500)),
}


@contextlib.contextmanager
def floor(row: Row) -> Iterator[tuple[int, str]]:
    """Run the floor; gives its port."""
    port = unused_port()
    model = {"name": "synthetic", "alpha_ms": row.alpha_ms, "beta_ms": row.beta_ms, "slo_ms": row.slo_ms}
    ways_back = ["--response-ms", "3" if row.slo_ms < 50.0 else "4"]
    with floor_of(port, row.gpus, [{**model, "rate_rps": 600.0 * row.gpus}], *ways_back, *_pictures(row)):
        yield port, "synthetic"


def _pictures(row: Row) -> list[str]:
    return ["--pictures"] if row.picture else []


@contextlib.contextmanager
def floor_of(port: int, gpus: int, models: list[dict[str, Any]], *options: str) -> Iterator[None]:
    """Run the floor with every model on each of the GPUs; see `floor/server.py`."""
    command = [sys.executable, str(FLOOR / "server.py"), str(port), str(gpus), json.dumps(models), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def ours(row: Row, scheduler: str = "deferred", gateways: int = 1) -> Iterator[tuple[int, str]]:
    """Serve on a Ray of our own; gives the port."""
    port = unused_port()
    with Launcher() as launcher:
        launcher.connect(num_gpus=row.gpus, address="local")
        deployment = Deployment(plan=row.plan(), port=port, executor="emulated", scheduler=scheduler, gateways=gateways)
        begin(launcher, deployment, "a run", "the laboratory")
        yield port, "synthetic"


@contextlib.contextmanager
def deployed(row: Row) -> Iterator[tuple[int, str]]:
    """Serve as operators do without Tenuto's commands: a plain `ray start`, and `serve deploy` of the generated config;
    gives the port. Nothing is left behind."""
    head, dashboard, agent, port = (unused_port(wished) for wished in _PLAIN_PORTS)
    beside = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="tenuto-", ignore_cleanup_errors=True) as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": folder,
            "PATH": f"{beside}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        config = Path(folder) / "plan.yaml"
        served = Deployment(plan=row.plan(), port=port, executor="emulated")
        config.write_text(yaml.safe_dump(served.config().to_data()))

        def run(*command: str) -> None:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)

        try:
            run(
                "ray",
                "start",
                "--head",
                "--node-ip-address=127.0.0.1",
                f"--port={head}",
                f"--num-gpus={row.gpus}",
                f"--dashboard-port={dashboard}",
                f"--dashboard-agent-listen-port={agent}",
                f"--temp-dir={folder}/ray",
                "--disable-usage-stats",
            )
            run("serve", "deploy", "-a", f"http://127.0.0.1:{dashboard}", str(config))
            wait_until_ready(port)
            yield port, "synthetic"
        finally:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, ValueError):
                    if folder.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)


_PLAIN_PORTS = (26479, 28475, 28476, 28470)  # above those that Ray gives to its workers


def wait_until_ready(port: int) -> None:
    """Wait until a server of ours takes requests."""
    until = time.monotonic() + 90.0
    while time.monotonic() < until:
        with contextlib.suppress(EnvironmentFaultError):
            if get_json(f"http://127.0.0.1:{port}/v2/health/ready").get("ready"):
                return
        time.sleep(0.3)
    raise SystemExit("what was deployed did not become ready")


@contextlib.contextmanager
def triton(row: Row, folder: Path) -> Iterator[tuple[int, str]]:
    """Run Triton; gives its port."""
    port = unused_port()
    with triton_server(
        folder,
        port,
        instances=row.gpus,
        alpha_ms=row.alpha_ms,
        beta_ms=row.beta_ms,
        slo_ms=row.slo_ms,
        datatype=row.picture or "FP32",
        shape=(3, 224, 224) if row.picture else (1,),
    ):
        yield port, "synthetic"


@contextlib.contextmanager
def busy_program(*, runs: bool) -> Iterator[None]:
    """Keep one core busy at nice 10."""
    if not runs:
        yield
        return
    program = subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def _processor_s() -> float:
    """Return the processor seconds so far of all processes that serve, Ray's included."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = (folder / "cmdline").read_bytes()
            if any(word in line for word in _SERVING):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def stolen() -> tuple[int, int]:
    """Return the ticks of all cores that the hypervisor gave to other machines, and all ticks; see proc(5)."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return steal, user + nice + system + idle + iowait + irq + softirq + steal


def open_loop(port: int, row: Row, rate: float, seconds: float, seed: int) -> str:
    """Offer a rate and return the client's line, with the processor time per request of all that serves, and the part
    of the cores that other machines took meanwhile."""
    before, (stolen_before, ticks_before) = _processor_s(), stolen()
    line = subprocess.run(
        [*LOAD, str(port), "synthetic", str(row.slo_ms), str(rate), "--seconds", str(seconds), "--seed", str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    spent_ms = 1e3 * (_processor_s() - before) / (rate * seconds)
    stolen_after, ticks = stolen()
    stolen_pct = 100.0 * (stolen_after - stolen_before) / max(1, ticks - ticks_before)
    return f"{line}; {spent_ms:.2f} ms of processor time a request; {stolen_pct:.0f} % of the cores taken by others"


def closed_loop(port: int, connections: int, picture: str) -> str:
    """Ask as fast as answers come; returns the client's line with the processor time per request of all that serves."""
    before, (stolen_before, ticks_before) = _processor_s(), stolen()
    arguments = [str(port), "synthetic", "1000", "--closed", str(connections)]
    sent = [*LOAD, *arguments, *(["--picture", picture] if picture else [])]
    line = subprocess.run(sent, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    found = re.search(r": (\d+)/s", line)
    assert found is not None
    seconds = 6.0  # five are counted, one is before them
    spent_ms = 1e3 * (_processor_s() - before) / (float(found[1]) * seconds)
    stolen_after, ticks = stolen()
    stolen_pct = 100.0 * (stolen_after - stolen_before) / max(1, ticks - ticks_before)
    return f"{line}; {spent_ms:.3f} ms of processor time a request; {stolen_pct:.0f} % of the cores taken by others"


def in_time(line: str) -> float:
    """Return the percentage in time of a client's line."""
    found = re.search(r"([\d.]+)% in time", line)
    assert found is not None
    return float(found[1])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--server",
        choices=("floor", "ours", "triton", "deployed"),
        action="append",
        help="default: the first three; deployed: ours by `serve deploy`",
    )
    parser.add_argument("--triton-wheel", default=WHEEL, help="a requirement or a file, for pip (default: %(default)s)")
    parser.add_argument("--row", choices=ROWS, action="append", help="default: all")
    parser.add_argument("--rates", type=float, nargs="*", help="instead of the row's own; without a number: none")
    parser.add_argument("--busy", action="store_true", help="beside a busy program at nice 10")
    parser.add_argument("--seconds", type=float, default=9.0, help="of each rate, the first is not counted")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--scheduler", default="deferred", help="of our server")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=0, help="cycles of 8 s far beyond capacity and 8 s at 100 r/s")
    parser.add_argument("--cold-starts", type=int, default=0, help="of our server at 700 r/s, 25 ms")
    parser.add_argument("--closed", type=int, nargs="+", help="connections of a closed loop, scheduler `eager`")
    parser.add_argument("--picture", choices=("FP32", "UINT8"), help="what a closed loop sends: 602 or 150 kB")
    given = parser.parse_args()
    heading(f"the served path{' beside a busy program' if given.busy else ''}, emulated GPUs, seed {given.seed}")
    servers = {"floor": floor, "deployed": deployed, "ours": lambda row: ours(row, given.scheduler, given.gateways)}
    if not given.server or "triton" in given.server:
        folder = installed(given.triton_wheel)
        if folder is not None:
            print(f"Triton: {SETTINGS}\n")
            servers["triton"] = lambda row: triton(row, folder)
    chosen = [name for name in given.server or ("floor", "ours", "triton") if name in servers]
    for key in given.row or (ROWS if given.rates != [] or given.cycles else ()):
        row = ROWS[key]
        for name in chosen:
            print(f"{row.name}, {name}", flush=True)
            with servers[name](row) as (port, _), busy_program(runs=given.busy):
                for rate in given.rates if given.rates is not None else row.rates:
                    print("  " + open_loop(port, row, rate, given.seconds, given.seed), flush=True)
                    if name == "ours":
                        margin = get_json(f"http://127.0.0.1:{port}/status")["margin"]
                        print(f"           margin {margin['margin_ms']:.2f} ms, late {margin['late_share']:.2%}")
                for cycle in range(given.cycles if name == "ours" else 0):
                    beyond = open_loop(port, row, 1498.0, 8.0, given.seed + cycle)
                    after = open_loop(port, row, 100.0, 8.0, given.seed + cycle)
                    print(f"  cycle {cycle}: {in_time(beyond):.1f} % of 1,498 r/s, then {in_time(after):.2f} % of 100")
    for start in range(given.cold_starts):
        with ours(ROWS["25"], given.scheduler) as (port, _):
            print(f"  cold start {start}: {open_loop(port, ROWS['25'], 700.0, 6.0, given.seed + start)}", flush=True)
    if given.closed:
        for name in chosen:
            row = Row("no latency", 2, 0.001, 0.0, 1000.0, (1000.0,), given.picture or "")
            with ours(row, "eager", given.gateways) if name == "ours" else servers[name](row) as (port, _):
                print(f"closed loop{' of ' + given.picture if given.picture else ''}, {name}", flush=True)
                for connections in given.closed:
                    print("  " + closed_loop(port, connections, given.picture or ""), flush=True)


if __name__ == "__main__":
    main()
