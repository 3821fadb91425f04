"""Walk docs/reference/security.md's way with a plain `ray start` and Ray's `serve deploy`: does the token work as said?

Run with `python -m lab.benchmarks.walk_plain_ray`. It starts a Ray with a home, a folder and ports of its own on this
machine, deploys a plan with Ray's own command, asks the gateway, asks Ray's ports as a stranger, and ends all of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import yaml

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import unused_port
from tests.instruments.plans import make_plan

_READY_S = 90.0
_PORTS = (26479, 28475, 28476, 28470)  # above those that Ray gives to its workers


def main() -> None:
    """Do it, and print what was seen; the exit code is 1 where something is not as documented."""
    with tempfile.TemporaryDirectory(prefix="tenuto-walk-", ignore_cleanup_errors=True) as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": folder,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        try:
            seen = _walk(Path(folder), environment)
        finally:
            _end(folder)
    wrong = [what for what, (found, wanted) in seen.items() if found != wanted]
    for what, (found, wanted) in seen.items():
        print(f"{'ok ' if found == wanted else 'NO '} {what}: {found}" + ("" if found == wanted else f", not {wanted}"))
    raise SystemExit(1 if wrong else 0)


def _walk(folder: Path, environment: Mapping[str, str]) -> dict[str, tuple[object, object]]:
    """Return what was found and what is documented, by what was asked."""
    seen: dict[str, tuple[object, object]] = {}

    def run(*command: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(
            command, env={**environment, **more}, cwd=folder, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    def doctor(line: str, **more: str) -> tuple[str, str]:
        checks = json.loads(run("tenuto", "doctor", "--json", **more)[1])["checks"]
        check = next(check for check in checks if check["name"] == line)
        return check["state"], check["cure"]

    head, dashboard, agent, port = (unused_port(wished) for wished in _PORTS)
    where = f"http://127.0.0.1:{dashboard}"
    plan = folder / "plan.yaml"
    deployment = Deployment(plan=make_plan({"n0/0/a": (100.0, ["synthetic"])}), executor="emulated", port=port)
    plan.write_text(yaml.safe_dump(deployment.config().to_data()))
    seen["doctor before a token"] = doctor("ray authentication")[1], "ray get-auth-token --generate, before `ray start`"
    run("ray", "get-auth-token", "--generate")
    token = folder / ".ray" / "auth_token"
    token.chmod(0o600)
    started = run(
        "ray",
        "start",
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={head}",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        "--num-cpus=2",
        "--num-gpus=1",
        f"--temp-dir={folder}/ray",
    )
    if started[0] != 0:
        raise SystemExit(f"ray start failed: {started[1][-2000:]}")
    seen["doctor's cure for `serve deploy`"] = (
        doctor("ray authentication")[1].split(" before ")[0],
        "export RAY_AUTH_MODE=token",
    )
    address = f"127.0.0.1:{head}"
    seen["doctor with the token"] = doctor("running ray", RAY_ADDRESS=address)[0], "ok"
    without = doctor("running ray", RAY_ADDRESS=address, RAY_AUTH_TOKEN_PATH=f"{folder}/none")
    seen["doctor without it"] = without[0], "fail"
    seen["serve deploy without the mode"] = run("serve", "deploy", "-a", where, "plan.yaml")[0], 1
    seen["serve deploy as documented"] = (run("serve", "deploy", "-a", where, "plan.yaml", RAY_AUTH_MODE="token")[0], 0)
    until = time.monotonic() + _READY_S
    while _asked(f"http://127.0.0.1:{port}/v2/health/ready") != 200 and time.monotonic() < until:
        time.sleep(0.5)
    seen["the gateway is ready"] = _asked(f"http://127.0.0.1:{port}/v2/health/ready"), 200
    job = b'{"entrypoint": "true"}'
    seen["a stranger's job at the dashboard"] = _asked(f"{where}/api/jobs/", job), 401
    for host in ("127.0.0.1", _own_address()):
        found = _asked(f"http://{host}:{agent}/api/job_agent/jobs/", job)
        if found is not None:
            seen[f"a stranger's job at the agent on {host}"] = found, 401
    seen["a stranger's look at Serve"] = _asked(f"{where}/api/serve/applications/"), 401
    seen["tenuto delete"] = run("tenuto", "delete", "--address", address)[0], 0
    return seen


def _asked(url: str, body: bytes | None = None) -> int | None:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _end(folder: str) -> None:
    """End the processes of that Ray alone: those that have its folder in their environment."""
    import ray  # noqa: F401  # it brings the next one

    import psutil  # isort: skip

    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder:
                process.kill()
        except psutil.Error:
            continue
    shutil.rmtree(f"{folder}/ray", ignore_errors=True)


if __name__ == "__main__":
    main()
