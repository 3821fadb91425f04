"""Triton's perf_analyzer: bounded loads over both protocols, whose counts agree with those of the server.

Its own package asks for glibc 2.38. This is the last release of the client's wheel that carries it for glibc 2.35, with
the two libraries that it needs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import debian_environment, debian_variables, python_environment, run
from served import Server
from verdicts import Case, run_suite

VERSION = "2.51.0"
REQUESTS = 2000
ROWS = 8  # of a request that has several
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return its version and its cases."""
    runtime = "nvidia-cuda-runtime-cu12"  # one library, without which the program does not start
    programs = python_environment(folder / "python", f"tritonclient=={VERSION}", runtime)
    variables = debian_variables(debian_environment(folder / "debian", "libb64-0d"))
    cuda = next((folder / "python").rglob("libcudart.so.12")).parent
    variables["LD_LIBRARY_PATH"] += f":{cuda}"

    def load(name: str, *words: str | Path, rows: int = 1, requests: int = REQUESTS) -> Case:
        asked = [programs / "perf_analyzer", "--request-count", str(requests), "-b", str(rows), *words]
        said = run(asked, environment=variables).stdout
        rate = re.search(r"Throughput: ([\d.]+) infer/sec", said) or re.search(r"Throughput: ([\d.]+)", said)
        p99 = re.search(r"p99 latency: (\d+) usec", said)
        counts = {key: int(count) for key, count in re.findall(r"(\w+ (?:request )?count): (\d+)", said)}
        if rate is None or p99 is None or float(rate[1]) == 0.0:
            return Case(name, "failed", said.partition("Usage:")[0].strip().replace("\n", " ")[:300])
        if "Inference count" in counts and counts["Inference count"] != rows * counts["Successful request count"]:
            found = f"{counts['Inference count']} inferences in {counts['Successful request count']} requests"
            return Case(name, "failed", f"the server counts {found} of {rows} each")
        return Case(name, "passed", f"{float(rate[1]):,.0f}/s, p99 {int(p99[1]) / 1000:.1f} ms")

    def cases(server: Server) -> Iterable[Case]:
        http = ("-m", "synthetic", "-i", "http", "-u", server.url.removeprefix("http://"), "--concurrency-range", "4")
        grpc = ("-m", "synthetic", "-i", "grpc", "-u", server.grpc, "--concurrency-range", "4")
        yield load("HTTP, binary", *http)
        yield load("HTTP, JSON", *http, "--input-tensor-format=json", "--output-tensor-format=json")
        yield load("HTTP, asynchronous", *http, "-a")
        yield load(f"HTTP, {ROWS} rows", *http, rows=ROWS)
        yield load("HTTP, 100 requests/s", *http[:-2], "--request-rate-range", "100", "--request-distribution=poisson")
        yield load("gRPC", *grpc)
        yield load(f"gRPC, {ROWS} rows", *grpc, rows=ROWS)
        yield load("gRPC, one stream", *grpc, "--streaming", "-a")
        yield load("gRPC, gzip", *grpc, "--grpc-compression-algorithm", "gzip")
        yield load("HTTP, a real network", "-m", "simple", *http[2:])
        payload = folder / "chat.json"
        payload.write_text(json.dumps({"data": [{"payload": [CHAT]}]}), "utf-8")
        openai = ("--service-kind", "openai", "--endpoint", "v1/chat/completions", "--input-data", payload)
        # This build knows streams of gRPC alone.
        words = ("-i", "http", "-u", server.url, "--concurrency-range", "4", "-a")
        yield load("OpenAI chat", "-m", "chat", *openai, *words, requests=40)

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("perf_analyzer", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
