"""A Ray of these tests comes up on a busy machine too, where its agents take longer to begin than it waits for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.instruments.forking import ROOT
from tests.instruments.live import PATIENCE_S

SLOW = """
import sys, time
from pathlib import Path

if any(name in Path("/proc/self/cmdline").read_text() for name in ("dashboard/agent.py", "runtime_env/agent/main.py")):
    time.sleep(20)
"""
PROGRAM = """
from tests.instruments.forking import forked_ray_workers
from tests.instruments.local_ray import LocalRay

with forked_ray_workers():
    ray = LocalRay()
    ray.connect()
    ray.forget()
"""


@pytest.mark.ray
@pytest.mark.night
def test_a_ray_waits_for_agents_that_are_slow(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join((str(tmp_path), str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
