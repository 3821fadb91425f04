"""A Ray with Ray's own autoscaler on this machine: nodes of some types start when they are asked for, and end idle.

    python -m tests.instruments.autoscaling_ray T4:1 A100:2

runs one until Ctrl-C, whose nodes have a T4 or two A100, and a head with a V100, all emulated.

`ray.cluster_utils.AutoscalingCluster` would end every other Ray of this user first, and needs a file that Ray's wheels
lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tenuto.deployments.process.ray_token import make_token
from tenuto.deployments.serve.launcher import RAY_ENVIRONMENT, unused_port
from tests.instruments.forking import ROOT
from tests.instruments.live import until

__all__ = ["LoopbackNodes", "autoscaling_ray", "give_notice"]

HEAD = "127.0.0.2"
_HEAD_ID = "f" * 51 + "00000"  # Ray's own for a head of fake nodes
_EMPTY_LISTS = ("setup_commands", "initialization_commands", "head_setup_commands", "worker_setup_commands")
_EMPTY_LISTS += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")


class LoopbackNodes:
    """Ray's provider of fake nodes, each at a loopback address of its own. The autoscaler's process makes it."""

    def __new__(cls, *args: Any) -> Any:
        import ray
        from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

        addresses = (f"127.0.1.{number}" for number in range(1, 255))
        ray.util.get_node_ip_address = lambda: next(addresses)
        return FakeMultiNodeProvider(*args)


@contextmanager
def autoscaling_ray(head_gpus: int, kinds: Mapping[str, int]) -> Iterator[str]:
    """Run a Ray and give its address. `kinds`: how many GPUs a node has, by the accelerator type of its label."""
    folder, port = tempfile.mkdtemp(prefix="r"), unused_port()
    config = {
        "cluster_name": "test",
        "max_workers": 4,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "external",
            "module": f"tests.instruments.autoscaling_ray.{LoopbackNodes.__name__}",
            "gcs_address": f"{HEAD}:{port}",
            "head_node_id": _HEAD_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,  # they install Ray by SSH
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            **{kind: _node_type(kind, gpus) for kind, gpus in kinds.items()},
        },
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_filter": [],
        **{name: [] for name in _EMPTY_LISTS},
    }
    Path(folder, "autoscaler.json").write_text(json.dumps(config), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_raylet_start_wait_time_s": "300",  # a busy machine is no fault
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
    }
    options = [f"--node-ip-address={HEAD}", f"--port={port}", "--num-cpus=2", f"--num-gpus={head_gpus}"]
    options += ["--include-dashboard=false", f"--temp-dir={folder}", f"--autoscaling-config={folder}/autoscaler.json"]
    with Path(folder, "start.log").open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
            env=environment,
            stdout=log,
            stderr=log,
        )
    import ray  # noqa: F401  # brings psutil
    from psutil import Process

    try:
        until(lambda: _answers(head, f"{HEAD}:{port}", Path(folder, "start.log")))
        yield f"{HEAD}:{port}"
    finally:
        own = Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.kill()
        head.wait(60)
        for process in own:
            if process.is_running():
                process.kill()


def give_notice(address: str, node_id: str, notice_s: float) -> None:
    """Say that a node of the Ray at this address ends in so many seconds, as who takes a spot machine away does."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason, ends_s = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, time.time() + notice_s
    is_accepted, why = GcsClient(address=address).drain_node(node_id, reason, "a test", int(1000 * ends_s))
    assert is_accepted, why


def main() -> None:
    """Run one, with our settings of Ray, until Ctrl-C."""
    os.environ.update({key: os.environ.get(key, value) for key, value in RAY_ENVIRONMENT.items()})
    os.environ["RAY_AUTH_MODE"] = "token"
    make_token()
    kinds = {kind: int(count) for kind, _, count in (each.partition(":") for each in sys.argv[1:])}
    with suppress(KeyboardInterrupt), autoscaling_ray(1, kinds) as address:
        print(f"a Ray runs at {address}; Ctrl-C ends it", flush=True)
        while True:
            time.sleep(1.0)


def _node_type(kind: str, gpus: int) -> dict[str, Any]:
    labels = {"ray.io/accelerator-type": kind}
    return {"resources": {"CPU": 1, "GPU": gpus}, "labels": labels, "node_config": {}, "max_workers": 2}


def _answers(head: subprocess.Popen[bytes], address: str, log: Path) -> bool:
    assert head.poll() is None, log.read_text(encoding="utf-8")
    from ray._raylet import GcsClient

    try:
        return bool(GcsClient(address=address).get_all_node_info(timeout=5.0))
    except Exception:  # Ray has several kinds of errors for a cluster that is not there yet
        return False


if __name__ == "__main__":
    main()
