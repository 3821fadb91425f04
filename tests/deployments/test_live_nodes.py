"""A Ray of three nodes, loopback addresses of this machine: each tells its GPUs, gpu-lets run on their GPU's node, and
a node dies."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.deployments.machines import node_gpus
from tenuto.deployments.machines.node_gpus import read_ray_inventory
from tenuto.deployments.serve.applications import Applications
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.placement import Cluster, Plan
from tests.instruments.live import PATIENCE_S, bring_up, pids, post, until
from tests.mps.fake_nvml import A100, V100, FakeGpu, FakeNvml

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

HEAD, OTHER, BARE, AGAIN = (f"127.0.0.{last}" for last in (2, 3, 4, 5))
LABEL = "tenuto.test/rack=b7"
STAGES = [{"model": "left", "shared": True}, {"model": "right", "shared": True, "inputs": {"INPUT0": "left.OUTPUT0"}}]
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}]}).encode()


def make_plan(*, other: str = LABEL) -> Plan:
    """A model on each node, one found by its address and one by its label, and an application that asks both."""
    latency = {"alpha_ms": 1.0, "beta_ms": 9.0}
    places = (("left", HEAD), ("right", other))
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [
                {"id": f"{name}/0", "type": "v100", "label" if "=" in place else "address": place}
                for name, place in places
            ],
            "gpulets": [
                {
                    "id": f"{name}/0/a",
                    "gpu": f"{name}/0",
                    "models": [{"name": name, "batch_size": 4, "latency": latency}],
                }
                for name, _ in places
            ],
            "models": [{"name": name, "rate_rps": 40, "slo_ms": 500, "latency": latency} for name, _ in places],
            "applications": [{"name": "both", "rate_rps": 5, "slo_ms": 60_000, "stages": STAGES}],
        }
    )


@pytest.fixture(scope="module")
def cluster(own_ray: None) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    head = {"node_ip_address": HEAD, "num_gpus": 1, "num_cpus": 2, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes.add_node(node_ip_address=OTHER, num_gpus=1, num_cpus=2, labels=dict([LABEL.split("=")]))
        nodes.add_node(node_ip_address=BARE, num_cpus=2)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def gpus_by_node() -> tuple[GpuDevice, ...]:
    """An A100 on the first node, a V100 on the second, and a third node without any GPU."""
    import ray

    node = ray.util.get_node_ip_address()
    if node == BARE:
        raise EnvironmentFaultError("no NVIDIA driver answers here.")
    gpu = FakeGpu(V100) if node == OTHER else FakeGpu(A100, "NVIDIA A100-SXM4-40GB", 40_960, (8, 0))
    return read_inventory(FakeNvml(gpu), lambda: {V100: 80, A100: 108})


def test_every_node_tells_its_gpus_and_the_verb_names_them(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def read() -> dict[str, tuple[GpuDevice, ...]]:
        return read_ray_inventory(60.0, gpus_by_node)

    monkeypatch.setattr(node_gpus, "read_ray_inventory", read)
    path = tmp_path / "cluster.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "--address", cluster.address, "-o", str(path), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [(gpu["address"], gpu["uuid"]) for gpu in found["gpus"]] == [(HEAD, A100), (OTHER, V100)]
    loaded = Cluster.load(path)
    assert [node.address for node in loaded.nodes] == [HEAD, OTHER]
    assert loaded.gpu_types == ("a100", "v100")


def addresses_by_gpulet(url: str) -> dict[str, str]:
    import ray

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {gpulet["id"]: nodes[gpulet["node_id"]] for gpulet in get_json(f"{url}/status")["gpulets"]}


def gateways_elsewhere_by_node() -> dict[str, list[str]]:
    """Ask on each node where the gateways are that it has none of."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    def ask() -> list[str]:
        return Applications().gateways_elsewhere()

    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    asked = {
        address: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for address, node in nodes.items()
    }
    return {address: ray.get(answer, timeout=PATIENCE_S) for address, answer in asked.items()}


def status_of(url: str, model: str) -> int:
    """Ask a model; 0 while no gateway listens, as its node may be the one that was lost."""
    try:
        return post(f"{url}/v2/models/{model}/infer", BODY)[0]
    except OSError:
        return 0


@contextmanager
def asking_both(url: str) -> Iterator[list[int]]:
    """Ask the application again and again until the block ends; gives how each request ended."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            statuses.append(status_of(url, "both"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()


def test_gpulets_run_on_the_node_of_their_gpu_and_a_lost_node_takes_only_its_own_away(cluster: Any) -> None:
    import ray

    port = unused_port()
    ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False)
    with Launcher() as launcher:
        launcher.connect(num_gpus=2)
        with pytest.raises(EnvironmentFaultError, match=r"on node 192\.0\.2\.7, the cluster has 127"):
            bring_up(launcher, Deployment(plan=make_plan(other="192.0.2.7"), port=port).config())
        bring_up(launcher, Deployment(plan=make_plan(), scheduler="eager", port=port, encrypt=True).config())
        url = launcher.base_url
        assert addresses_by_gpulet(url) == {"left/0/a": HEAD, "right/0/a": OTHER}
        for name in ("left", "right", "both"):
            assert status_of(url, name) == 200
        there = gateways_elsewhere_by_node()
        (with_gateway,) = (node for node, elsewhere in there.items() if not elsewhere)
        assert [elsewhere for node, elsewhere in there.items() if node != with_gateway] == [[with_gateway]] * 2
        before = pids(url)
        (lost,) = (node for node in cluster.worker_nodes if node.node_ip_address == OTHER)
        with asking_both(url) as statuses:
            until(lambda: len(statuses) > 3)
            cluster.remove_node(lost, allow_graceful=False)
            until(lambda: set(pids(url)) == {"left/0/a"})
        assert set(statuses) <= {200, 503, 504, 0}  # 0: the gateway was on that node
        until(lambda: status_of(url, "both") in (503, 504))
        until(lambda: status_of(url, "left") == 200)
        until(lambda: status_of(url, "right") in (503, 504))
        cluster.add_node(node_ip_address=AGAIN, num_gpus=1, num_cpus=2, labels=dict([LABEL.split("=")]))
        until(lambda: status_of(url, "right") == 200)
        until(lambda: len(pids(url)) == 2)
        until(lambda: status_of(url, "both") == 200)
        assert addresses_by_gpulet(url)["right/0/a"] == AGAIN  # the label is where it was, the address is not
        assert pids(url)["left/0/a"] == before["left/0/a"]
