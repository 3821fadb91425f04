"""Nodes that join a cluster: taken in by type, refused with the reason, and not told twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tenuto import __version__
from tenuto.deployments.machines import joining_nodes
from tenuto.deployments.machines.joining_nodes import Answer, JoiningNodes
from tenuto.deployments.serve.deployment import Deployment
from tenuto.errors import EnvironmentFaultError
from tenuto.mps import inventory
from tenuto.placement.cluster import Gpu
from tenuto.placement.plan import PlannedGpu
from tests.instruments.plans import make_plan
from tests.mps.fake_mig import FakeMigGpu, FakeMigNvml
from tests.mps.fake_nvml import A100, V100, FakeGpu, FakeNvml

T4 = {"t4": {}}


def node(name: str, *, gpus: float = 1.0, address: str = "10.0.0.9", **labels: str) -> dict[str, Any]:
    """Return a node as Ray describes it."""
    given = {"ray.io/node-id": name, **{key.replace("__", "/").replace("_", "-"): v for key, v in labels.items()}}
    given = {key if "/" in key else f"ray.io/{key}": value for key, value in given.items()}
    return {"NodeID": name, "NodeManagerAddress": address, "Resources": {"GPU": gpus, "CPU": 2.0}, "Labels": given}


class Nodes:
    """A Ray cluster whose tasks run at once, with what each node's driver would say."""

    def __init__(self, **how: Any) -> None:
        self.alive: list[dict[str, Any]] = []
        self.says: dict[str, Answer] = {}
        self.now_s = 1000.0
        self.is_slow = False
        self.started: list[str] = []
        options = {"types": T4, "declared": [], "emulated": True, "needs_mps": False, **how}
        self.joining = JoiningNodes(
            **options, nodes=lambda: self.alive, start=self._start, poll=self._poll, clock=lambda: self.now_s
        )

    def _start(self, name: str, describe: Callable[[], Answer]) -> Answer:
        self.started.append(name)
        return self.says[name] if name in self.says else describe()

    def _poll(self, task: Answer) -> tuple[bool, Answer]:
        return not self.is_slow, task

    def look(self, *present: Gpu) -> dict[str, str]:
        return {gpu.id: gpu.type for gpu in self.joining.find_gpus(present)}


def test_a_node_is_taken_in_by_its_label_with_memory_price_and_its_own_address() -> None:
    nodes = Nodes(types={"a100-80gb": {}, "t4": {}})
    nodes.alive = [node("aa", gpus=2.0, accelerator_type="T4"), node("bb", accelerator_type="A100")]
    gpus = nodes.joining.find_gpus(())
    assert [(gpu.id, gpu.type) for gpu in gpus] == [("ray-aa/0", "t4"), ("ray-aa/1", "t4"), ("ray-bb/0", "a100-80gb")]
    assert {gpu.label for gpu in gpus} == {"ray.io/node-id=aa", "ray.io/node-id=bb"}
    assert (gpus[0].memory_mib, gpus[0].price_per_hour) == (15_360, 0.526)
    nodes.alive = nodes.alive[:1]
    assert nodes.look() == {"ray-aa/0": "t4", "ray-aa/1": "t4"}
    assert nodes.started == ["aa", "bb"]  # each is asked once


def test_processes_start_at_the_address_of_a_node_that_has_it_alone() -> None:
    """What is bound to an id fails at once while Ray drains the node, and Serve starts it again and again."""
    nodes = Nodes()
    nodes.alive = [node(name, address=f"10.0.0.{last}", accelerator_type="T4") for name, last in (("aa", 1), ("bb", 2))]
    nodes.alive.append(node("cc", gpus=0.0, address="10.0.0.2"))
    one, other = nodes.joining.find_gpus(())
    assert (one.address, other.address) == ("10.0.0.1", None)
    plan = make_plan({"ray-aa/0/a": (100.0, ["a"]), "ray-bb/0/a": (100.0, ["b"])})
    plan = plan.model_copy(update={"gpus": (PlannedGpu.of(one), PlannedGpu.of(other))})
    starts = [each.actor.node for each in Deployment(plan=plan).config().gpulets]
    assert starts == ["10.0.0.1", "ray.io/node-id=bb"]
    nodes.alive = [node("dd", address="10.0.0.1", accelerator_type="T4")]
    assert nodes.look() == {"ray-dd/0": "t4"}


def test_the_driver_tells_type_and_layout_where_gpus_are_real() -> None:
    nvml = FakeMigNvml(FakeMigGpu(), FakeGpu(V100))
    nvml.gpu.cut("3g.20gb", 4)
    nodes = Nodes(types={"a100": {}, "v100": {}}, emulated=False)
    nodes.says["aa"] = inventory.read_inventory(nvml, lambda: {V100: 80})
    nodes.alive = [node("aa", gpus=2.0, accelerator_type="T4")]
    gpus = nodes.joining.find_gpus(())
    assert [(gpu.id, gpu.type, gpu.mig) for gpu in gpus] == [
        ("ray-aa/0.4", "a100-3g.20gb", "fixed"),
        ("ray-aa/1", "v100", None),
    ]
    assert gpus[1].memory_mib == 16_160
    assert gpus[1].uuid == V100


def test_plans_may_cut_the_gpus_that_join_where_the_operator_says_so() -> None:
    nvml = FakeMigNvml(FakeMigGpu(), FakeGpu(V100))
    nvml.gpu.cut("3g.20gb", 4)
    nodes = Nodes(types={"a100": {}, "v100": {}}, cut=["a100"], emulated=False)
    nodes.says["aa"] = inventory.read_inventory(nvml, lambda: {V100: 80})
    nodes.says["bb"] = inventory.read_inventory(FakeMigNvml(FakeMigGpu(uuid="GPU-b")), dict)  # in MIG mode, not cut
    nodes.says["cc"] = inventory.read_inventory(FakeMigNvml(FakeMigGpu(uuid="GPU-c", mig=0)), lambda: {"GPU-c": 108})
    nodes.alive = [node(name) for name in ("aa", "bb", "cc")]
    assert [(gpu.id, gpu.type, gpu.mig) for gpu in nodes.joining.find_gpus(())] == [
        ("ray-aa/0.4", "a100-3g.20gb", "managed"),
        ("ray-aa/1", "v100", None),
        ("ray-bb/0", "a100", "managed"),
        ("ray-cc/0", "a100", "managed"),
    ]
    emulated = Nodes(types={"a100": {}, "t4": {}}, cut=["a100"])
    emulated.alive = [node("aa", accelerator_type="A100-40G"), node("bb", accelerator_type="T4")]
    assert [(gpu.type, gpu.mig) for gpu in emulated.joining.find_gpus(())] == [("a100", "managed"), ("t4", None)]


@pytest.mark.parametrize("emulated", [True, False])
def test_a_controller_that_starts_again_finds_all_gpus_of_a_node_of_which_the_plan_uses_some(emulated: bool) -> None:
    nodes = Nodes(types={"v100": {}}, emulated=emulated)
    driver = FakeNvml(FakeGpu(V100), FakeGpu(other := "GPU-0000"))
    nodes.says["aa"] = () if emulated else inventory.read_inventory(driver, lambda: {V100: 80, other: 80})
    nodes.alive = [node("aa", gpus=2.0, accelerator_type="V100")]
    first = nodes.joining.find_gpus(())
    assert len(first) == 2
    for known in ((), first[:1], first):
        again = Nodes(types={"v100": {}}, emulated=emulated)
        again.says, again.alive = nodes.says, nodes.alive
        assert again.joining.find_gpus(known) == first
        assert not again.joining.unused


def test_nodes_that_were_declared_or_left_out_are_not_taken_in() -> None:
    nodes = Nodes(declared=["00"])
    nodes.alive = [node(f"{i}{i}", address=f"10.0.0.{i}", accelerator_type="T4") for i in range(3)]
    nodes.alive[2]["Labels"]["rack"] = "r7"
    by_address = Gpu(id="n0/0", type="t4", memory_mib=1.0, address="10.0.0.1")
    by_label = Gpu(id="n1/0", type="t4", memory_mib=1.0, label="rack=r7")
    assert nodes.look(by_address, by_label) == {}
    assert not nodes.joining.unused
    assert nodes.look(by_address) == {"ray-22/0": "t4"}
    assert Nodes(types={}).look() == {}


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("it has Tenuto 0.0.1, the controller 9", "it has Tenuto 0.0.1, the controller 9"),
        ("no NVIDIA driver answers", "no NVIDIA driver answers"),
        ((), "its driver, which shows no GPU, is no type in `gpus` of control.yaml"),
        (inventory.read_inventory(FakeNvml(FakeGpu(V100)), lambda: {V100: 80}), "its Tesla V100-SXM2-16GB is no type"),
        (inventory.read_inventory(FakeMigNvml(FakeMigGpu()), dict), f"{A100}: in MIG mode without a MIG device"),
    ],
)
def test_a_node_of_no_use_is_named_with_the_reason(says: Answer, why: str) -> None:
    nodes = Nodes(emulated=False)
    nodes.says["aa"] = says
    nodes.alive = [node("aa")]
    assert nodes.look() == {}
    (line,) = nodes.joining.unused.items()
    assert line[0] == "ray-aa (10.0.0.9)"
    assert line[1].startswith(why)


def test_a_node_that_does_not_answer_yet_or_has_other_labels_waits() -> None:
    nodes = Nodes()
    nodes.is_slow = True
    nodes.alive = [node("aa", accelerator_type="T4"), node("bb", accelerator_type="L4")]
    assert nodes.look() == {}
    assert not nodes.joining.unused
    nodes.now_s += 300.0
    assert nodes.look() == {}
    assert list(nodes.joining.unused.values()) == ["it does not tell its GPUs"] * 2
    nodes.is_slow = False
    assert nodes.look() == {"ray-aa/0": "t4"}
    assert "its labels are of no type" in nodes.joining.unused["ray-bb (10.0.0.9)"]


def test_own_labels_say_the_type_where_ray_has_no_name_for_it() -> None:
    nodes = Nodes(types={"3080": {"pool/gpu": "gamer"}})
    nodes.alive = [node("aa", pool__gpu="gamer"), node("bb", pool__gpu="other")]
    assert nodes.look() == {"ray-aa/0": "3080"}


def test_nodes_of_a_spot_market_are_one_rack() -> None:
    nodes = Nodes()
    t4s = {"accelerator_type": "T4"}
    nodes.alive = [node("aa", **t4s, market_type="spot"), node("bb", **t4s, market_type="on-demand"), node("cc", **t4s)]
    assert [gpu.rack for gpu in nodes.joining.find_gpus(())] == ["spot", None, None]


def test_a_gpu_that_joins_under_another_name_is_not_told_twice() -> None:
    nodes = Nodes(types={"v100": {}}, emulated=False)
    devices = inventory.read_inventory(FakeNvml(FakeGpu(V100)), lambda: {V100: 80})
    nodes.says = {"aa": devices, "bb": devices}
    nodes.alive = [node("aa"), node("bb")]
    assert nodes.look() == {"ray-aa/0": "v100"}
    assert nodes.joining.unused == {"ray-bb (10.0.0.9)": f"{V100} is ray-aa/0 already"}
    declared = Gpu(id="n0/0", type="v100", memory_mib=1.0, uuid=V100, address="10.0.0.1")
    assert nodes.look(declared) == {}
    assert set(nodes.joining.unused.values()) == {f"{V100} is n0/0 already"}
    assert nodes.look() == {"ray-aa/0": "v100"}  # the declared node is lost


def test_a_node_that_comes_and_goes_is_held_back_longer_each_time() -> None:
    nodes = Nodes(types={"v100": {}}, emulated=False)
    waits_s = []
    for number in range(4):
        name = f"n{number}"
        nodes.says[name] = inventory.read_inventory(FakeNvml(FakeGpu(V100)), lambda: {V100: 80})
        nodes.alive = [node(name)]
        since_s = nodes.now_s
        while not nodes.look():
            assert f"it left {number} times soon" in nodes.joining.unused[f"ray-{name} (10.0.0.9)"]
            nodes.now_s += 10.0
        waits_s.append(nodes.now_s - since_s)
        nodes.alive = []
        nodes.look()
    assert waits_s == [0.0, 60.0, 120.0, 240.0]


def test_what_a_node_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = inventory.read_inventory(FakeNvml(FakeGpu(V100)), lambda: {V100: 80})
    monkeypatch.setattr(inventory, "read_inventory", lambda: devices)
    describe = joining_nodes.describe_self
    assert describe(True, False)() == ()
    assert describe(False, False)() == devices
    monkeypatch.setenv("PATH", "")
    assert describe(False, True)() == "it has no nvidia-cuda-mps-control, which the plan needs"

    def broken() -> Answer:
        raise EnvironmentFaultError("NVML does not answer")

    monkeypatch.setattr(inventory, "read_inventory", broken)
    assert describe(False, False)() == "NVML does not answer"
    later = describe(True, False)
    monkeypatch.setattr("tenuto.__version__", "0.0.1")
    assert later() == f"it has Tenuto 0.0.1, the controller {__version__}"
