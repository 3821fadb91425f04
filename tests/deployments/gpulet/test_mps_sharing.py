"""Gpu-lets of a shared GPU, with driver and daemon in memory: joined, proved, hit by faults, gone."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tenuto.deployments.gpulet import replica as gpulet_module
from tenuto.deployments.gpulet.mps_sharing import GpuEdges, SharedGpu, bound, join_shared_gpu
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.diff import diff
from tenuto.deployments.serve.user_config import GpuletSpec
from tenuto.deployments.wire.frames import connect
from tenuto.deployments.wire.messages import GpuletState, Hello
from tenuto.deployments.wire.status import MpsStatus
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.others import OtherProcess
from tenuto.mps.share import client_environment
from tenuto.mps.sm_count import VisibleDevice
from tenuto.placement import Plan
from tests.instruments.live import PATIENCE_S
from tests.mps.conftest import bench as bench  # the fixture
from tests.mps.fake_mig import FakeMigGpu, FakeMigNvml
from tests.mps.fake_nvml import A100, FakeGpu, FakeNvml
from tests.mps.fakes import OTHER, UUID, Bench


def spec(name: str = "n0/0/a", share_pct: float | None = 40.0) -> dict[str, Any]:
    gpu = {"id": "n0/0", "type": "v100", "uuid": UUID}
    return {
        "gpulet": name,
        "gpu": gpu,
        "share_pct": share_pct,
        "memory_mib": 3000.0,
        "executor": "emulated",
        "mps": "auto",
        "cuda_mps": True,
    }


def devices(**changes: Any) -> tuple[GpuDevice, ...]:
    return read_inventory(FakeNvml(FakeGpu(**{"uuid": UUID, **changes})), lambda: {UUID: 80, OTHER: 80})


def shared(bench: Bench, *, pid: int = 41, sm_count: int = 32, uuid: str = UUID, **changes: Any) -> SharedGpu:
    """A gpu-let's process on the bench; CUDA shows it `sm_count` SMs of `uuid`."""
    planned = changes.pop("planned", spec())
    environment = client_environment(UUID, planned["share_pct"], 3000.0)
    return SharedGpu(
        GpuletSpec.model_validate(planned),
        daemon=bench.gpulet(),
        edges=GpuEdges(
            devices=changes.pop("devices", devices),
            pid=pid,
            visible=lambda: (VisibleDevice(uuid, sm_count),),
            environment=changes.pop("environment", environment),
            others=changes.pop("others", lambda daemon: ()),
            free_mib=lambda: changes.get("free_mib", 2900.0),
            watch_xids=lambda uuid: changes.get("xids"),
            sleep=bench.clock.sleep,
        ),
    )


@pytest.fixture
def started(bench: Bench) -> SharedGpu:
    found = shared(bench)
    found.join()
    bench.daemon.connect(41)
    found.prove()
    return found


def test_a_gpulet_that_got_its_share_says_so(started: SharedGpu) -> None:
    started.check()
    assert started.status() == MpsStatus(
        uuid=UUID, sm_count=32, gpu_sm_count=80, memory_limit="0=3000M", proof="pid", others=[], xids=None
    )


def test_a_cap_that_is_not_applied_is_found_although_the_process_is_attached(bench: Bench) -> None:
    found = shared(bench, free_mib=15_900.0)
    found.join()
    bench.daemon.connect(41)
    with pytest.raises(EnvironmentFaultError, match=r"15900 MiB of free memory.*cap of 3000 MiB is not applied"):
        found.prove()


def test_a_gpu_with_as_many_clients_as_its_driver_allows_takes_no_other(bench: Bench) -> None:
    bench.gpulet().join()
    for pid in range(1000, 1048):
        bench.daemon.connect(pid)
    with pytest.raises(EnvironmentFaultError, match=r"48 clients, and its driver allows 48\. Plan fewer gpu-lets"):
        shared(bench).join()


class Xids:
    """The driver's reports: a list that a test fills."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] = ()

    def look(self) -> tuple[int, ...]:
        return self.seen


def test_a_gpu_that_is_unwell_is_left_and_a_fault_of_a_neighbour_is_only_told(bench: Bench) -> None:
    xids = Xids()
    found = shared(bench, xids=xids)
    found.join()
    bench.daemon.connect(41)
    found.prove()
    xids.seen = (13,)
    found.check()
    assert found.status().xids == [13]
    xids.seen = (13, 79)
    with pytest.raises(EnvironmentFaultError, match="Xid 79: the GPU itself is unwell"):
        found.check()


def test_a_look_at_the_server_takes_one_run_of_the_control_program(bench: Bench, started: SharedGpu) -> None:
    started.check()
    asked = len(bench.daemon.commands)
    for _ in range(5):
        started.check()
    assert len(bench.daemon.commands) == asked + 5


def test_a_program_that_takes_one_command_only_is_asked_one_by_one(bench: Bench, started: SharedGpu) -> None:
    bench.daemon.takes_one_command = True
    started.check()
    bench.daemon.status = "FAULT"
    with pytest.raises(EnvironmentFaultError, match="has to start again"):
        started.check()


def test_the_second_waits_until_the_first_is_proved(bench: Bench) -> None:
    first, second = shared(bench), shared(bench, pid=42)
    first.join()
    with pytest.raises(EnvironmentFaultError, match="admission"):
        second.join()
    bench.daemon.connect(41)
    first.prove()
    second.join()
    bench.daemon.connect(42)
    second.prove()
    assert bench.daemon.starts == 1
    assert bench.reapers == [UUID]


def test_a_gpulet_without_attachment_is_refused_and_lets_the_next_one_start(bench: Bench) -> None:
    first = shared(bench, sm_count=80)  # CUDA found no daemon and took everything
    first.join()
    with pytest.raises(EnvironmentFaultError, match=r"does not list its process 41.*80 of 80 multiprocessors"):
        first.prove()
    shared(bench, pid=42).join()


def test_permuted_ordinals_are_found(bench: Bench) -> None:
    found = shared(bench, uuid=OTHER)
    found.join()
    bench.daemon.connect(41)
    with pytest.raises(EnvironmentFaultError, match=f"runs on {OTHER}"):
        found.prove()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"uuid": OTHER}, f"no {UUID}"), ({"mig": 1}, "-mig 0"), ({"capability": (6, 1)}, "older than Volta")],
)
def test_a_gpu_that_cannot_be_shared_is_refused_before_a_daemon_starts(
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EnvironmentFaultError, match=reason):
        shared(bench, devices=lambda: devices(**changes)).join()
    assert bench.daemon.starts == 0


def test_a_process_started_with_another_environment_is_refused(bench: Bench) -> None:
    environment = client_environment(UUID, 60.0, 3000.0)
    with pytest.raises(EnvironmentFaultError, match="PERCENTAGE is 60 instead of 40"):
        shared(bench, environment=environment).join()
    with pytest.raises(EnvironmentFaultError, match="should not be"):
        shared(bench, environment=environment, planned=spec(share_pct=None)).join()


def test_after_a_fault_all_of_the_gpu_leave_and_start_in_turn(bench: Bench, started: SharedGpu) -> None:
    second = shared(bench, pid=42)
    second.join()
    bench.daemon.connect(42)
    second.prove()
    bench.daemon.status = "FAULT"
    for lost in (started, second):
        with pytest.raises(EnvironmentFaultError, match="has to start again"):
            lost.check()
        lost.leave()
    again = shared(bench, pid=51)
    with pytest.raises(EnvironmentFaultError, match="stays FAULT"):
        again.join()  # the old processes have not left the server
    bench.daemon.client_pids.clear()
    bench.daemon.status = "ACTIVE"
    for pid in (51, 52):
        again = shared(bench, pid=pid)
        again.join()
        bench.daemon.connect(pid)
        again.prove()
        again.check()
    assert bench.daemon.starts == 1


def test_a_lost_client_is_found(bench: Bench, started: SharedGpu) -> None:
    bench.daemon.client_pids.clear()
    with pytest.raises(EnvironmentFaultError, match="no client"):
        started.check()


def test_a_daemon_that_is_late_is_forgiven_twice_and_a_dead_one_never(bench: Bench, started: SharedGpu) -> None:
    bench.daemon.refusals_before_ready = 3
    started.check()
    started.check()
    with pytest.raises(EnvironmentFaultError, match="daemon is lost"):
        started.check()
    started.check()
    bench.daemon.is_running = False
    del bench.processes.alive[bench.daemon.pid]
    with pytest.raises(EnvironmentFaultError, match="daemon is lost"):
        started.check()


def test_others_on_the_gpu_are_told_and_refused_where_cuda_mps_is_required(bench: Bench) -> None:
    other, hidden = OtherProcess(88, "python", 1001), OtherProcess(99, None, None)
    found = shared(bench, others=lambda daemon: (other, hidden))
    found.join()
    assert found.status().others == [other, hidden]
    found.leave()
    required = {**spec(), "mps": "required"}
    with pytest.raises(EnvironmentFaultError, match=r"process 88 \(python, user 1001\) also use.*mps: auto"):
        shared(bench, others=lambda daemon: (other, hidden), planned=required).join()
    assert bench.clock.now >= 20.0
    assert not bench.gpulet().is_used()
    shared(bench, others=lambda daemon: (hidden,), planned=required).join()  # may be one of ours, seen from elsewhere


def test_a_process_that_is_just_leaving_is_waited_for(bench: Bench) -> None:
    answers = iter([(OtherProcess(88, "python", 1001),), ()])
    found = shared(bench, others=lambda daemon: next(answers), planned={**spec(), "mps": "required"})
    found.join()
    assert found.status().others == []


def test_faults_that_gpulets_see_end_their_restarts(bench: Bench) -> None:
    bench.daemon.connect(40)
    for pid in (41, 42, 43):
        found = shared(bench, pid=pid)
        found.join()
        bench.daemon.connect(pid)
        found.prove()
        bench.daemon.status = "FAULT"
        for _ in range(2):
            with pytest.raises(EnvironmentFaultError, match="has to start again"):
                found.check()
        with pytest.raises(EnvironmentFaultError, match="is in FAULT"), found.turn():
            pass
        found.leave()
        bench.daemon.status = "ACTIVE"
    with pytest.raises(EnvironmentFaultError, match="faulted 3 times"):
        shared(bench, pid=44).join()
    assert not bench.gpulet().is_used()


def test_a_client_known_by_another_pid_is_watched_and_ended_by_that(bench: Bench) -> None:
    found = shared(bench)
    found.join()
    bench.processes.number = 77
    bench.daemon.connect(9041)
    found.prove()
    found.check()
    assert found.status().proof == "the only client that came during its start"
    found.terminate()
    assert "terminate_client 701 9041" in bench.daemon.commands
    with pytest.raises(EnvironmentFaultError, match="9041 is no client"):
        found.check()


def test_work_in_flight_is_ended_before_the_process(bench: Bench, started: SharedGpu) -> None:
    started.terminate()
    assert "terminate_client 701 41" in bench.daemon.commands
    started.terminate()  # refused and logged: it is no client any more


def test_nothing_is_joined_where_the_plan_asks_for_nothing() -> None:
    assert join_shared_gpu(GpuletSpec.model_validate({**spec(), "cuda_mps": False}), has_driver=True) is None
    assert join_shared_gpu(GpuletSpec.model_validate(spec()), has_driver=False) is None
    assert join_shared_gpu(GpuletSpec.model_validate({**spec(), "executor": "emulated"}), has_driver=True) is None


# --- the plan's side --------------------------------------------------------------------------------------------


def plan(*shares: float | None, mps: str = "auto", uuid: str | None = UUID, kind: str = "v100") -> Plan:
    replica = {"name": "m", "batch_size": 2, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "mps": mps,
            "gpus": [{"id": "g", "type": kind, "uuid": uuid}],
            "gpulets": [
                {"id": f"g/{i}", "gpu": "g", "share_pct": share, "memory_mib": 2000, "models": [replica]}
                for i, share in enumerate(shares)
            ],
            "models": [{"name": "m", "rate_rps": 10, "slo_ms": 100, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}}],
        }
    )


def environments(made: Plan, **options: Any) -> list[dict[str, str]]:
    return [dict(application.actor.environment) for application in Deployment(plan=made, **options).config().gpulets]


def test_every_gpulet_of_a_shared_gpu_has_its_environment_before_its_process_starts() -> None:
    small, rest = environments(plan(40.0, None))
    assert small["CUDA_VISIBLE_DEVICES"] == rest["CUDA_VISIBLE_DEVICES"] == UUID
    assert small["CUDA_MPS_PIPE_DIRECTORY"] == rest["CUDA_MPS_PIPE_DIRECTORY"]
    assert small["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in rest
    assert small["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2000M"


@pytest.mark.parametrize(
    ("made", "uses"),
    [
        (plan(None), False),
        (plan(100.0), False),
        (plan(50.0), True),
        (plan(None, None), True),
        (plan(None, mps="required"), True),
        (plan(50.0, mps="off"), False),
        (plan(50.0, uuid=None), False),
        (plan(50.0, kind="cpu"), False),
    ],
)
def test_when_cuda_mps_is_used(made: Plan, uses: bool) -> None:
    assert all(("CUDA_MPS_PIPE_DIRECTORY" in environment) is uses for environment in environments(made))


def test_a_first_neighbour_restarts_a_gpulet_that_ran_without_cuda_mps() -> None:
    reasons = {change.gpulet: change.reasons for change in diff(plan(None), plan(None, None))}
    assert reasons["g/0"] == ("CUDA MPS: False → True",)
    logical = diff(plan(None, uuid=None), plan(None, None, uuid=None))
    assert "restart" not in {change.kind for change in logical}


# --- the replica ------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for `SharedGpu` inside a replica and writes down what happens to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: EnvironmentFaultError | None = None
        self.proved_by = ""

    def prove(self) -> None:
        self.calls.append("prove")
        self.proved_by = threading.current_thread().name
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def status(self) -> MpsStatus:
        return MpsStatus(uuid=UUID, sm_count=32)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.calls.append("turn")
        yield
        self.calls.append("turn ends")

    def terminate(self) -> None:
        self.calls.append("terminate")

    def leave(self) -> None:
        self.calls.append("leave")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(gpulet_module, "join_shared_gpu", lambda spec, has_driver: found)
    return found


ENTRY = {"name": "m", "batch_size": 2, "latency": {"alpha_ms": 0.01, "beta_ms": 0.01}, "members": [{"name": "m"}]}
MODELS = {"programs": [ENTRY]}


async def replica() -> LocalReplica:
    made = LocalReplica.__new__(LocalReplica)
    await made.__init__(spec())  # type: ignore[misc]  # as Serve does
    return made


async def said_by(made: LocalReplica) -> GpuletState:
    """Return what it tells a dispatcher that connects."""
    endpoint = await made.endpoint()
    said: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    connection = await connect(
        endpoint.address, Hello(endpoint.token), lambda _, message, _body: said.set_result(message), lambda *_: None
    )
    state = await asyncio.wait_for(said, PATIENCE_S)
    assert isinstance(state, GpuletState)
    connection.close()
    return state


async def test_a_replica_proves_itself_once_after_the_warm_up_and_leaves_last(recorder: Recorder) -> None:
    made = await replica()
    assert recorder.calls == []
    await made.reconfigure(MODELS)
    await made.reconfigure(MODELS)
    await made.check_health()
    assert recorder.calls == ["prove"]
    assert recorder.proved_by == "gpulet n0/0/a"
    assert (await said_by(made)).cuda_mps == MpsStatus(uuid=UUID, sm_count=32)
    await made.close()
    assert recorder.calls == ["prove", "leave"]


async def test_models_added_to_a_running_gpulet_load_in_its_turn(recorder: Recorder) -> None:
    made = await replica()
    await made.reconfigure(MODELS)
    await made.reconfigure(MODELS)  # nothing to load: no turn
    assert recorder.calls == ["prove"]
    added = {"programs": [ENTRY, {**ENTRY, "name": "other", "members": [{"name": "other"}]}]}
    await made.reconfigure(added)
    assert recorder.calls == ["prove", "turn", "turn ends"]
    await made.reconfigure(MODELS)  # only unloads
    assert recorder.calls == ["prove", "turn", "turn ends"]
    await made.close()


async def test_a_replica_without_proof_never_becomes_ready(recorder: Recorder) -> None:
    made = await replica()
    recorder.failure = EnvironmentFaultError("not attached")
    with pytest.raises(EnvironmentFaultError, match="not attached"):
        await made.reconfigure(MODELS)
    await made.close()


async def test_a_replica_hit_by_a_fault_stays_unhealthy_though_the_server_recovers(recorder: Recorder) -> None:
    made = await replica()
    await made.reconfigure(MODELS)
    recorder.failure = EnvironmentFaultError("a fault hit all of this GPU")
    with pytest.raises(EnvironmentFaultError):
        await made.check_health()
    recorder.failure = None
    with pytest.raises(EnvironmentFaultError, match="a fault hit"):
        await made.check_health()
    await made.close()


async def test_a_gpu_is_left_when_the_executor_cannot_be_had(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(spec: object) -> None:
        raise EnvironmentFaultError("no torch")

    monkeypatch.setattr(gpulet_module, "make_executor", fails)
    with pytest.raises(EnvironmentFaultError, match="no torch"):
        await replica()
    assert recorder.calls == ["leave"]


def in_instance(start: int) -> GpuletSpec:
    place = {"gpu": "n0/0", "start": start, "slices": 4, "gpu_uuid": A100}
    gpu = {"id": f"n0/0.{start}", "type": "a100-3g.20gb", "instance": place}
    return GpuletSpec.model_validate({**spec(f"n0/0.{start}/a"), "executor": "auto", "gpu": gpu})


def test_a_gpulet_in_an_instance_finds_it_by_its_place_and_has_share_and_daemon_inside() -> None:
    nvml, environment = FakeMigNvml(FakeMigGpu()), {"CUDA_VISIBLE_DEVICES": "0"}
    for start in (0, 4):
        nvml.gpu.cut("3g.20gb", start)
    devices = read_inventory(nvml, dict)
    found = bound(in_instance(4), has_driver=True, devices=lambda: devices, environment=environment)
    assert found.gpu.uuid == devices[1].uuid
    assert environment == client_environment(devices[1].uuid, 40.0, 3000.0)
    assert devices[1].uuid in environment["CUDA_MPS_PIPE_DIRECTORY"]


def test_a_gpulet_whose_instance_is_not_there_says_what_is() -> None:
    nvml = FakeMigNvml(FakeMigGpu())
    nvml.gpu.cut("2g.10gb", 4)
    with pytest.raises(EnvironmentFaultError, match=r"has no a100-3g.20gb at 4; it has a100-2g.10gb at 4"):
        bound(in_instance(4), has_driver=True, devices=lambda: read_inventory(nvml, dict), environment={})
    assert bound(in_instance(4), has_driver=False) == in_instance(4)


def test_an_instance_that_is_made_anew_is_the_same_process_in_a_plan() -> None:
    def of(uuid: str | None, mig: str) -> Plan:
        place = {"gpu": "n0/0", "start": 4, "slices": 4, "gpu_uuid": A100}
        gpu = {"id": "n0/0.4", "type": "a100-3g.20gb", "uuid": uuid, "mig": mig, "instance": place}
        held = [{"name": "m", "batch_size": 1, "latency_ms": 5}]
        return Plan.from_data(
            {
                "policy": {"name": "hand"},
                "gpus": [gpu],
                "gpulets": [{"id": "x", "gpu": "n0/0.4", "share_pct": 50, "models": held}],
                "models": [{"name": "m", "rate_rps": 1, "slo_ms": 100}],
            }
        )

    first, second = of("MIG-1", "managed").processes()["x"], of(None, "managed").processes()["x"]
    assert first == second
    assert first.cuda_mps
    assert of("MIG-1", "fixed").processes()["x"].uuid == "MIG-1"
