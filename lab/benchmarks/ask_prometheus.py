"""Let a real Prometheus scrape a made-up server and evaluate every alert and every expression of the dashboard.

Run with `python -m lab.benchmarks.ask_prometheus`; needs `prometheus` in the path. It prints the expressions that found
nothing. These should only be alerts that have no reason to fire.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tenuto.deployments.serve.launcher import unused_port
from tests.deployments.operator.test_live_page import operators_port
from tests.deployments.operator.test_watching import WATCHING, expressions
from tests.instruments.shown_status import ShownServer

_SCRAPES_S = 25.0

_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs: [{{job_name: tenuto, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def main() -> None:
    """Start both on loopback, wait for some scrapes, and ask."""
    if shutil.which("prometheus") is None:
        raise SystemExit("`prometheus` is not in the path. Install it (apt-get install prometheus), or add its folder.")
    port = unused_port()

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]

    with operators_port(ShownServer(models=8, gpulets=12)) as url, tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(_CONFIG.format(alerts=WATCHING / "alerts.yaml", target=url.removeprefix("http://")))
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(_SCRAPES_S)
            print("target:", [target["health"] for target in get("targets")["activeTargets"]])
            print("rules:", {rule["health"] for group in get("rules")["groups"] for rule in group["rules"]})
            print("alerts:", {alert["labels"]["alertname"]: alert["state"] for alert in get("alerts")["alerts"]})
            found = {title: _asked(get, expression) for title, expression in expressions()}
            print("found nothing:", ", ".join(title for title, result in found.items() if not result))
        finally:
            prometheus.terminate()
            prometheus.wait()


def _asked(get: Any, expression: str) -> Any:
    query = expression.replace("$__rate_interval", "10s").replace("$model", ".*")
    return get("query?" + urlencode({"query": query}))["result"]


if __name__ == "__main__":
    main()
