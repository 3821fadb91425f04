"""Redocly (npm's @redocly/cli): lints the OpenAPI document that a gateway gives, by its recommended rules."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import node_environment, run
from served import Server, get
from verdicts import Case, last_line, run_suite

PACKAGE = "@redocly/cli@2.77.0"
QUIET = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return its version, and a case for each rule that the document breaks."""
    program = node_environment(folder, PACKAGE) / "node_modules/.bin/redocly"

    def cases(server: Server) -> Iterable[Case]:
        document = folder / "openapi.json"
        document.write_bytes(get(f"{server.url}/openapi.json"))
        done = run([program, "lint", "--format=json", "--extends=recommended", document], environment=QUIET)
        try:
            problems = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])["problems"]
        except (ValueError, KeyError):
            yield Case("lint", "failed", last_line(done.stdout))
            return
        rules: dict[str, list[dict]] = {}
        for problem in problems:
            rules.setdefault(problem["ruleId"], []).append(problem)
        if not rules:
            yield Case("lint", "passed")
        for rule, broken in sorted(rules.items()):
            first = broken[0]
            place = first["location"][0].get("pointer", "") if first["location"] else ""
            yield Case(rule, "failed", f"{len(broken)} {first['severity']}s, first {place}: {first['message']}")

    return PACKAGE.rpartition("@")[2], cases


def main() -> int:
    """Run it."""
    return run_suite("redocly", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
