"""What an operator's commands know of what runs, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys

from tenuto.deployments.control.operations import is_orphaned, sign_launcher
from tests.instruments.stores import DictStore


def test_what_a_process_leaves_is_its_own_until_it_is_gone() -> None:
    store = DictStore()
    assert not is_orphaned(store)  # by `tenuto deploy`: it ends with nobody
    sign_launcher(store)
    assert not is_orphaned(store)
    (key,) = store.values
    signed = json.loads(store.values[key])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.put(key, json.dumps({**signed, "pid": ended.pid}).encode())
    assert is_orphaned(store)
    store.put(key, json.dumps({**signed, "started": "1"}).encode())  # the number is another process's by now
    assert is_orphaned(store)
    store.put(key, json.dumps({**signed, "pid": ended.pid, "machine": "another"}).encode())
    assert not is_orphaned(store)
