"""Kill processes while a batch is worked off, and count how often each of its lines is answered in the output file.

    python lab/benchmarks/bench_offline_kills.py [--lines 100000] [--kills 20] [--every-s 10] [--seed 0]

A Ray of its own serves one emulated model on two gpu-lets, behind two gateways and two dispatchers, with a store of
batches in a temporary folder. One batch of `lines` requests is sent over HTTP. Every `every-s` seconds a process drawn
from the seed gets SIGKILL: the store's, a gateway's, a dispatcher's or a gpu-let's, each kind in turn. When the batch
is over before all kills, another begins, and all are counted. The last line is the verdict; the exit code is 1 when a
line has no answer or several, or one that is no output of the model for its input.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from bench_operating import pids_of
from serving import PATH, synthetic_plan

from tenuto.deployments.control.operations import begin
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port

_TITLES = ("tenuto-offline", "tenuto:gateway", "dispatcher-", "gpulet-")
_OVER = ("completed", "failed", "expired", "cancelled")
_PATIENCE_S = 120.0  # for an answer of the store, whose process may have been killed


def ask(url: str, data: bytes | None = None, kind: str = "application/json") -> bytes:
    """Return the answer of a gateway; ask again while processes are replaced."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, {"content-type": kind}), timeout=60
            ) as answer:
                return bytes(answer.read())
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > until_s:
                raise SystemExit(f"NOT GOOD: {url} does not answer: {error}") from error
            time.sleep(0.5)


def begin_batch(url: str, lines: int, path: str = PATH) -> dict[str, Any]:
    """Send a file of so many requests for a path, and begin its batch."""
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32"}
    rows = "".join(
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": path, "body": {"inputs": [{**tensor, "data": [n]}]}})
        + "\n"
        for n in range(lines)
    )
    parts = (("purpose", "batch"), ('file"; filename="requests.jsonl', rows))
    form = "".join(f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in parts)
    file = json.loads(ask(f"{url}/v1/files", f"{form}--b--\r\n".encode(), "multipart/form-data; boundary=b"))
    body = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    found: dict[str, Any] = json.loads(ask(f"{url}/v1/batches", json.dumps(body).encode()))
    return found


def strike(kind: str, draw: random.Random) -> str:
    """Kill a process of a kind; return what was killed, empty where none is there."""
    found = pids_of(f"ServeReplica:{kind}")
    if not found:
        return ""
    pid = draw.choice(found)
    os.kill(pid, signal.SIGKILL)
    return f"{kind} {pid}"


def faults_of(url: str, batch: dict[str, Any], lines: int) -> list[str]:
    """Return what is wrong with the answers of a batch."""
    rows = [json.loads(row) for row in ask(f"{url}/v1/files/{batch['output_file_id']}/content").splitlines()]
    failed = b"" if not batch["error_file_id"] else ask(f"{url}/v1/files/{batch['error_file_id']}/content")
    counts = Counter(row["custom_id"] for row in rows)
    wrong = sum(not row["response"]["body"].get("outputs") for row in rows)
    missing = [n for n in range(lines) if f"r{n}" not in counts]
    twice = [name for name, count in counts.items() if count != 1]
    faults = [f"{batch['status']}: {batch['request_counts']}"] if batch["status"] != "completed" else []
    faults += [f"{len(missing)} lines have no output, such as r{missing[0]}"] if missing else []
    faults += [f"{len(twice)} lines have several, such as {twice[0]}"] if twice else []
    faults += [f"{wrong} answers have no outputs"] if wrong else []
    return faults + ([f"in the file of errors: {failed[:300]!r}"] if failed else [])


def main() -> None:
    """Kill, count, print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, kills, faults, batches = random.Random(args.seed), 0, [], 0
    plan = synthetic_plan(1.0, 5.0, 200.0, 400.0, gpus=2, batch_size=32)
    with tempfile.TemporaryDirectory() as folder, Launcher(progress=lambda t: print(t, file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=2, address="local")
        settings = {"plan": plan.to_data(), "executor": "emulated", "port": unused_port(), "gateways": 2}
        deployment = Deployment.model_validate({**settings, "offline": {"path": folder}})
        begin(launcher, deployment, "a run", "the laboratory")
        began_s = next_s = time.monotonic()
        while kills < args.kills:
            batches += 1
            batch = begin_batch(deployment.url, args.lines)
            while batch["status"] not in _OVER:
                if kills < args.kills and time.monotonic() >= next_s and batch["status"] == "in_progress":
                    struck = strike(_TITLES[kills % len(_TITLES)], draw)
                    kills += bool(struck)
                    print(
                        f"{time.monotonic() - began_s:.0f} s: {batch['request_counts']}, killed {struck}",
                        file=sys.stderr,
                    )
                    next_s = time.monotonic() + args.every_s
                time.sleep(0.2)
                batch = json.loads(ask(f"{deployment.url}/v1/batches/{batch['id']}"))
            faults += faults_of(deployment.url, batch, args.lines)
        seconds = time.monotonic() - began_s
    print("\n".join(faults))
    print(
        f"{'NOT GOOD' if faults else 'GOOD'}: {batches} batches of {args.lines} lines, {kills} processes killed, "
        f"{seconds:.0f} s; each line was {'not ' if faults else ''}answered exactly once"
    )
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
