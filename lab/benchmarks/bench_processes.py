"""Which processes take how much of the processor: in the seconds after the start, idle and under load, beside a Ray
Serve with nothing of ours in it; and how much memory each has for itself.

Processor time is that of /proc, in ticks of 10 ms: ask for some seconds of each.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from bench_served import LOAD, ROWS, ours
from serving import heading

from tenuto.deployments.serve.launcher import Launcher, unused_port

_TICKS_S = os.sysconf("SC_CLK_TCK")
_KINDS = (
    ("raylet", r"raylet/raylet "),
    ("rehearsals", r"dispatch\.rehearsals"),
    ("gateway", r"ray::.*[Gg]ateway"),
    ("dispatcher", r"ray::.*[Dd]ispatcher"),
    ("gpu-let", r"ray::.*[Gg]pulet"),
    ("Serve's controller", r"ray::ServeController"),
    ("Serve's proxy", r"ray::.*Proxy"),
    ("waiting workers", r"ray::IDLE|default_worker"),
    ("GCS", r"gcs_server"),
    ("agents", r"[Aa]gent"),
    ("log monitor", r"log_monitor"),
    ("autoscaler's monitor", r"monitor\.py"),
    ("other processes of Ray", r"ray[/:]"),
)


def spent() -> dict[int, tuple[str, float]]:
    """Return the kind and the processor seconds so far of every process below this one."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        found[pid] = (_kind(line), (int(fields[11]) + int(fields[12])) / _TICKS_S)

    def is_below(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == os.getpid():
                return True
        return False

    return {pid: entry for pid, entry in found.items() if is_below(pid)}


def _kind(line: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, line)), "")


def by_kind(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """Return the processor seconds between two looks, by kind of process."""
    sums: defaultdict[str, float] = defaultdict(float)
    for pid, (kind, seconds) in after.items():
        if kind:
            sums[kind] += seconds - before.get(pid, ("", 0.0))[1]
    return sums


def show(title: str, sums: Mapping[str, float], seconds: float, requests: float = 0.0) -> None:
    """Print who took what: percent of a core, and ms a request where there were any."""
    whole = sum(sums.values())
    parts = [
        f"{kind} {100 * value / seconds:.1f}" + (f" ({1e3 * value / requests:.3f} ms)" if requests else "")
        for kind, value in sorted(sums.items(), key=lambda item: -item[1])
        if value / seconds >= 0.001
    ]
    each = f", {1e3 * whole / requests:.3f} ms a request" if requests else ""
    print(f"{title}: {100 * whole / seconds:.1f} % of a core{each}: {'; '.join(parts)}", flush=True)


def memory() -> None:
    """Print each kind's processes with their private and proportional memory."""
    for pid, (kind, _) in sorted(spent().items()):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.M))
        private = int(sizes["Private_Clean"]) + int(sizes["Private_Dirty"])
        whole = int(sizes["Pss"])
        print(f"  {kind or '?'}: {private >> 10} MiB of its own, {whole >> 10} with its part of what is shared")


def watch(title: str, seconds: float, step_s: float) -> None:
    """Print what was taken, step by step."""
    before = spent()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        time.sleep(step_s)
        after = spent()
        show(f"{title}, {seconds - (until - time.monotonic()):.0f} s", by_kind(before, after), time.monotonic() - begun)
        before = after


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true", help="only a Ray Serve without an application")
    parser.add_argument("--settle-s", type=float, default=30.0, help="watched after the start, in steps")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--rates", type=float, nargs="*", default=[600.0, 1400.0])
    parser.add_argument("--closed", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each rate")
    parser.add_argument("--scheduler", default="deferred")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    heading("processor time by process")
    if given.bare:
        with Launcher() as launcher:
            launcher.connect(num_gpus=2, address="local")
            from ray import serve

            serve.start(http_options={"host": "127.0.0.1", "port": unused_port()})
            watch("bare", given.settle_s, 5.0)
            before = spent()
            time.sleep(given.idle_s)
            show("bare, idle", by_kind(before, spent()), given.idle_s)
            memory()
        return
    row = ROWS["25"]
    with ours(row, given.scheduler, given.gateways) as (port, _):
        if given.settle_s:
            watch("after ready", given.settle_s, 5.0)
        if given.idle_s:
            before = spent()
            time.sleep(given.idle_s)
            show("idle", by_kind(before, spent()), given.idle_s)
        for rate in given.rates:
            sent = [
                *LOAD,
                str(port),
                "synthetic",
                str(row.slo_ms),
                str(rate),
                "--seconds",
                str(given.seconds),
                "--seed",
                str(given.seed),
            ]
            before = spent()
            line = subprocess.run(sent, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            print(line)
            show(f"{rate:g} r/s", by_kind(before, spent()), given.seconds, rate * given.seconds)
        for connections in given.closed:
            before = spent()
            sent = [*LOAD, str(port), "synthetic", "1000", "--closed", str(connections)]
            line = subprocess.run(sent, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            print(line)
            answered = 6.0 * float(line.split(": ")[1].split("/s")[0])
            show(f"{connections} connections", by_kind(before, spent()), 6.0, answered)
        memory()


if __name__ == "__main__":
    sys.exit(main())
