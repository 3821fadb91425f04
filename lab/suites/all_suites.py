"""Every suite, one after the other, against one server; prints one table, with date, machine and versions."""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from openai_python import MODELS
from served import served
from verdicts import ENVIRONMENTS, PASSED, UNAVAILABLE, Row, rows_of, table

# Those that take a moment first.
SUITES = (
    "promtool",
    "redocly",
    "h2load",
    "h2spec",
    "triton_examples",
    "perf_analyzer",
    "npm_clients",
    "openai_python",
    "loadgen",
    "guidellm",
    "aiperf",
    "inference_perf",
)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser("all_suites", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"which; all by default: {', '.join(SUITES)}")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, metavar="DIR")
    parser.add_argument("--h2spec", metavar="DIR", help="a checkout of github.com/summerwind/h2spec")
    parser.add_argument(
        "--triton-client", metavar="DIR", help="a checkout of github.com/triton-inference-server/client"
    )
    given = parser.parse_args()
    unknown = sorted(set(given.suites) - set(SUITES))
    if unknown:
        parser.error(f"unknown suites: {', '.join(unknown)}")
    checkouts = {"h2spec": given.h2spec, "triton_examples": given.triton_client}
    rows = []
    with served(MODELS) as server:
        described = f"{server.http_port},{server.grpc_port},{server.operator_port},{server.tokenizer}"
        for suite in given.suites or SUITES:
            print(f"== {suite}", flush=True)
            words = ["--server", described, "--environments", str(given.environments)]
            words += ["--checkout", checkouts[suite]] if checkouts.get(suite) else []
            command = [sys.executable, str(Path(__file__).with_name(f"{suite}.py")), *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
            print(done.stdout, flush=True)
            said = "cannot run here" if done.returncode == UNAVAILABLE else f"ended with {done.returncode}"
            rows += rows_of(done.stdout) or [Row(suite, "", failed=int(done.returncode != UNAVAILABLE), figures=said)]
    from tenuto.loadgen.result_folder import hardware, versions

    machine = hardware()
    listed = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{datetime.now(UTC).date()}, {machine['processor']}, {machine['cores']} cores, {listed}\n\n{table(rows)}")
    return max((row.status for row in rows), default=PASSED)


if __name__ == "__main__":
    sys.exit(main())
