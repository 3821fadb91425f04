"""Clients of npm: `openai`, and `ai` with `@ai-sdk/openai-compatible`, against a real language model."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import node_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

PACKAGES = ("openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92")
DRIVERS = ("openai.mjs", "ai_sdk.mjs")


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return the packages' versions and their cases."""
    node_environment(folder, *PACKAGES)

    def cases(server: Server) -> Iterable[Case]:
        for name in DRIVERS:
            # Node looks for packages beside the file.
            driver = shutil.copy2(Path(__file__).parent / "drivers" / name, folder / name)
            done = run(["node", "--no-warnings", driver, server.url, "tiny"])
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
            for each in map(json.loads, lines):
                yield Case(each["name"], "failed" if each["said"] else "passed", each["said"] or "")
            if done.returncode:
                yield Case(name, "failed", last_line(done.stdout))

    return ", ".join(" ".join(package.rsplit("@", 1)) for package in PACKAGES), cases


def main() -> int:
    """Run it."""
    return run_suite("npm_clients", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
