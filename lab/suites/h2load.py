"""h2load (Debian's nghttp2-client): every request of a bounded load is answered with 2xx, over HTTP/1.1 and HTTP/2.

HTTP/2 is asked where gRPC is served, with calls of `ServerLive`; their status of gRPC is in a trailer, which h2load
does not read, so it counts as answered what has the HTTP status 200.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import debian_environment, debian_variables, run
from served import Server
from verdicts import Case, last_line, run_suite

REQUESTS, CONNECTIONS = 2000, 16
TENSOR = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return h2load's version and its cases."""
    variables = debian_variables(debian_environment(folder, "nghttp2-client"))

    def load(name: str, *words: str | Path) -> Case:
        done = run(["h2load", "-n", str(REQUESTS), "-c", str(CONNECTIONS), *words], environment=variables)
        answered = re.search(r"status codes: (\d+) 2xx", done.stdout)
        rate = re.search(r"finished in .*?, ([\d.]+) req/s", done.stdout)
        if answered is None or rate is None:
            return Case(name, "failed", last_line(done.stdout))
        if int(answered[1]) != REQUESTS:
            return Case(name, "failed", f"{answered[1]} of {REQUESTS} answered with 2xx")
        return Case(name, "passed", f"{float(rate[1]):,.0f} requests/s")

    def cases(server: Server) -> Iterable[Case]:
        body, call = folder / "tensor.json", folder / "call.bin"
        body.write_text(json.dumps(TENSOR), "utf-8")
        call.write_bytes(bytes(5))  # an empty message: flag and length
        infer = f"{server.url}/v2/models/synthetic/infer"
        yield load("HTTP/1.1, GET", "--h1", f"{server.url}/v2/health/live")
        yield load("HTTP/1.1, infer", "--h1", "-d", body, "-H", "content-type: application/json", infer)
        method = f"http://{server.grpc}/inference.GRPCInferenceService/ServerLive"
        words = ("-d", call, "-H", "content-type: application/grpc", "-H", "te: trailers", method)
        yield load("HTTP/2, gRPC", *words)
        yield load("HTTP/2, gRPC, 32 streams each", "-m", "32", *words)

    return run(["h2load", "--version"], environment=variables).stdout.split("/")[-1].strip(), cases


def main() -> int:
    """Run it."""
    return run_suite("h2load", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
