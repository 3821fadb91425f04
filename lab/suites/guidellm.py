"""GuideLLM: synthetic prompts to an emulated model, at several profiles; it checks the server's health first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import python_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

VERSION = "0.8.1"
REQUESTS = 20
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return its version and its cases."""
    programs = python_environment(folder, f"guidellm=={VERSION}")

    def benchmark(server: Server, name: str, profile: str, route: str = "/v1/chat/completions", more: str = "") -> Case:
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        words = {
            "--backend": f"kind=openai_http,target={server.url},model=chat,request_format={route}{more}",
            "--profile": profile,
            "--constraint": f"kind=max_requests,count={REQUESTS}",
            "--tokenizer": f"kind=huggingface_auto,model={server.tokenizer}",
            "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output": f"kind=json,path={report}",
        }
        asked = [part for pair in words.items() for part in pair]
        done = run([programs / "guidellm", "run", "--disable-progress", *asked])
        if done.returncode or not report.exists():
            return Case(name, "failed", last_line(done.stdout))
        ran = json.loads(report.read_text("utf-8"))["benchmarks"][0]
        metrics = ran["metrics"]
        totals = metrics["request_totals"]
        if totals["successful"] < REQUESTS or totals["errored"]:
            wrong = [str((each.get("info") or {}).get("error"))[:200] for each in ran["requests"]["errored"]]
            return Case(name, "failed", f"{totals['successful']} of {REQUESTS} answered: {', '.join(set(wrong))}")
        tokens = metrics["output_token_count"]["successful"]["mean"]
        if tokens != OUTPUT_TOKENS:
            return Case(name, "failed", f"{tokens:g} tokens an answer, {OUTPUT_TOKENS} were asked for")
        said = f"{1000.0 * metrics['request_latency']['successful']['mean']:.0f} ms"
        ttft_ms = metrics["time_to_first_token_ms"]["successful"]["mean"]  # 0 of an answer that comes whole
        return Case(name, "passed", said + (f", TTFT {ttft_ms:.0f} ms" if ttft_ms else ""))

    def cases(server: Server) -> Iterable[Case]:
        yield benchmark(server, "chat, 4 at once", "kind=concurrent,streams=4")
        yield benchmark(server, "completions, 4 at once", "kind=concurrent,streams=4", "/v1/completions")
        yield benchmark(server, "chat, not streamed", "kind=concurrent,streams=4", more=",stream=false")

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("guidellm", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
