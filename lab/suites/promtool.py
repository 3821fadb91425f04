"""promtool (Debian's prometheus): `check metrics` on what /metrics says, `check rules` on the shipped alerts."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import debian_environment, debian_variables, run
from served import Server, get
from verdicts import Case, last_line, run_suite

ALERTS = Path(__file__).parents[2] / "deployments/operator/watching/alerts.yaml"


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return promtool's version and its cases."""
    variables = debian_variables(debian_environment(folder, "prometheus"))

    def check(name: str, *words: str | Path, given: str = "") -> Case:
        done = run(["promtool", "check", *words], environment=variables, given=given)
        # promtool's exit status is 3 where it only has advice.
        return Case(name, "failed" if done.returncode else "passed", last_line(done.stdout) if done.returncode else "")

    def cases(server: Server) -> Iterable[Case]:
        said = get(f"{server.operator_url}/metrics").decode()
        yield check("check metrics, operator's port", "metrics", given=said)
        yield check("check rules, alerts.yaml", "rules", ALERTS)

    version = re.search(r"version (\S+)", run(["promtool", "--version"], environment=variables).stdout)
    return version[1] if version else "", cases


def main() -> int:
    """Run it."""
    return run_suite("promtool", __doc__, prepare)


if __name__ == "__main__":
    sys.exit(main())
