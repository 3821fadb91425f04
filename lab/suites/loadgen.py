"""MLPerf LoadGen's server scenario: valid for requests, and for answers token by token with bounds on both latencies.

A run counts as passed when LoadGen calls it VALID and the server counted as many requests as LoadGen issued.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import python_environment, run
from served import Server, get
from verdicts import Case, last_line, run_suite

VERSION = "6.0.17"
DRIVER = Path(__file__).parent / "drivers/loadgen.py"
# Rates that a busy machine of two cores carries, for long enough that LoadGen's early stopping has its queries.
REQUESTS = ("--model", "synthetic", "--qps", "60", "--seconds", "20", "--latency-ms", "200")
TOKENS = (
    "--model",
    "chat",
    "--qps",
    "8",
    "--seconds",
    "100",
    "--latency-ms",
    "1000",
    "--tokens",
    "24",
    "--tpot-ms",
    "100",
)
FIGURES = ("Completed samples per second", "99.00 percentile latency (ns)", "99.00 percentile first token latency (ns)")


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return LoadGen's version and its cases."""
    python = python_environment(folder, f"mlcommons-loadgen=={VERSION}") / "python"

    def counted(server: Server, model: str) -> int:
        told = json.loads(get(f"{server.url}/v2/models/{model}/stats"))["model_stats"][0]
        return int(told["inference_stats"]["success"]["count"])

    def valid(server: Server, name: str, words: tuple[str, ...]) -> Case:
        output = folder / name
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        before = counted(server, words[1])
        done = run([python, DRIVER, server.url, output, *words])
        summary = output / "mlperf_log_summary.txt"
        if done.returncode or not summary.exists():
            return Case(name, "failed", last_line(done.stdout))
        issued = json.loads(done.stdout.splitlines()[-1])["issued"]
        answered = counted(server, words[1]) - before
        said = dict(re.findall(r"^ *(\S.*?) *: (.+)$", summary.read_text("utf-8"), re.MULTILINE))
        figures = ", ".join(f"{key} {said[key]}" for key in said if key in FIGURES)
        if said.get("Result is") != "VALID":
            return Case(name, "failed", f"LoadGen calls it {said.get('Result is')}; {figures}")
        if answered != issued:
            return Case(name, "failed", f"the server counts {answered} requests, LoadGen issued {issued}")
        return Case(name, "passed", f"VALID, {issued} queries, {figures}")

    def cases(server: Server) -> Iterable[Case]:
        yield valid(server, "requests", REQUESTS)
        yield valid(server, "tokens", TOKENS)

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("loadgen", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
