"""AIPerf: chats and completions, streamed and whole, of an emulated model, every one of which ends with its tokens."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import python_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

VERSION = "0.13.0"
REQUESTS, TOKENS = 40, 16


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return its version and its cases."""
    programs = python_environment(folder, f"aiperf=={VERSION}")

    def profile(server: Server, name: str, *words: str) -> Case:
        output = folder / "artifacts"
        shutil.rmtree(output, ignore_errors=True)
        lengths = ("--isl", "32", "--isl-stddev", "0", "--osl", str(TOKENS), "--osl-stddev", "0")
        asked = ("--model", "chat", "--url", server.url, "--tokenizer", server.tokenizer, "--artifact-dir", output)
        amount = ("--request-count", str(REQUESTS), "--concurrency", "4", "--ui", "none", "--random-seed", "0")
        done = run([programs / "aiperf", "profile", *asked, *lengths, *amount, *words])
        report = next(output.rglob("profile_export_aiperf.json"), None)
        if report is None:
            return Case(name, "failed", last_line(done.stdout))
        figures = json.loads(report.read_text("utf-8"))

        def mean(key: str) -> float:
            return float((figures.get(key) or {}).get("avg") or 0.0)

        errors = figures.get("error_summary") or []
        if done.returncode or errors or mean("request_count") != REQUESTS:
            said = json.dumps(errors)[:300] if errors else last_line(done.stdout)
            return Case(name, "failed", f"{mean('request_count'):g} of {REQUESTS} answered; {said}")
        if "min_tokens" in "".join(words) and mean("output_sequence_length") != TOKENS:
            return Case(name, "failed", f"{mean('output_sequence_length'):g} tokens an answer, {TOKENS} were asked for")
        ttft = f", TTFT {mean('time_to_first_token'):.0f} ms" if "--streaming" in words else ""
        return Case(name, "passed", f"{mean('request_latency'):.0f} ms{ttft}")

    def cases(server: Server) -> Iterable[Case]:
        exact = ("--extra-inputs", f"min_tokens:{TOKENS}", "--extra-inputs", "ignore_eos:true")
        streamed = ("--streaming", "--use-server-token-count")
        yield profile(server, "chat, streamed", "--endpoint-type", "chat", "--streaming")
        yield profile(server, "chat, exact lengths", "--endpoint-type", "chat", *streamed, *exact)
        yield profile(server, "completions, streamed", "--endpoint-type", "completions", "--streaming")

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("aiperf", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
