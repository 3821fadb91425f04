"""inference-perf of Kubernetes' working group: rising rates of random prompts, asked as vLLM is."""

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

VERSION = "0.7.0"
STAGES = ((2, 5), (5, 5))  # requests/s, seconds
# Its random prompts are for completions alone, those with a shared beginning for chats too.
LENGTHS = {"min": 8, "max": 16, "mean": 12, "std_dev": 2, "total_count": 64}
DATA = {
    "completion": {"type": "random", "input_distribution": LENGTHS, "output_distribution": LENGTHS},
    "chat": {
        "type": "shared_prefix",
        "shared_prefix": {
            "num_groups": 2,
            "num_prompts_per_group": 32,
            "system_prompt_len": 16,
            "question_len": 16,
            "output_len": 12,
        },
    },
}


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return its version and its cases."""
    package = f"inference-perf=={VERSION}"  # asks for Python 3.12, and runs with 3.11
    is_newer = sys.version_info >= (3, 12)
    programs = python_environment(folder, package) if is_newer else python_environment(folder, newer_python=package)

    def stages(server: Server, name: str, interface: str, *, is_streamed: bool, ignores_end: bool) -> Case:
        output = folder / "reports"
        shutil.rmtree(output, ignore_errors=True)
        given = {
            "api": {"type": interface, "streaming": is_streamed},
            "data": DATA[interface],
            "load": {
                "type": "constant",
                "num_workers": 1,
                "stages": [{"rate": rate, "duration": seconds} for rate, seconds in STAGES],
            },
            "server": {"type": "vllm", "model_name": "chat", "base_url": server.url, "ignore_eos": ignores_end},
            "tokenizer": {"pretrained_model_name_or_path": str(server.tokenizer)},
            "storage": {"local_storage": {"path": str(output)}},
        }
        (folder / "config.yml").write_text(json.dumps(given), "utf-8")
        done = run([programs / "inference-perf", "--config_file", folder / "config.yml"])
        report = next(output.rglob("summary_lifecycle_metrics.json"), None)
        if done.returncode or report is None:
            return Case(name, "failed", last_line(done.stdout))
        figures = json.loads(report.read_text("utf-8"))
        answered, failed = figures["successes"]["count"], figures["failures"]["count"]
        asked = sum(rate * seconds for rate, seconds in STAGES)
        if failed or answered != asked:
            said = json.dumps(figures["failures"].get("by_label", {}))[:200]
            return Case(name, "failed", f"{answered} of {asked} answered, {failed} failed: {said}")
        return Case(name, "passed", f"{1000 * figures['successes']['latency']['request_latency']['mean']:.0f} ms")

    def cases(server: Server) -> Iterable[Case]:
        yield stages(server, "completions, streamed", "completion", is_streamed=True, ignores_end=True)
        yield stages(server, "completions, whole", "completion", is_streamed=False, ignores_end=False)
        yield stages(server, "chats, streamed", "chat", is_streamed=True, ignores_end=True)

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("inference_perf", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
