"""Every listening socket of a running system is known, bound to this machine, and closed to whoever has no token."""

import http.client
import os

import pytest

from tenuto.deployments.serve.config import serve_config
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher
from tenuto.placement import Plan
from tests.instruments.live import PORT, infer

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

# What a system listens with, by the kind of its process: how many TCP sockets at most, and what they are for.
KNOWN = {
    "driver": (1, "the core worker of whoever started it (gRPC, token)"),
    "gcs_server": (1, "Ray's head (gRPC, token)"),
    "raylet": (2, "Ray's node manager and object manager (gRPC, token)"),
    "ray::DashboardAgent": (4, "Ray's agent: gRPC, metrics, and HTTP that takes jobs (token)"),
    "ray::RuntimeEnvAgent": (1, "Ray's preparation of environments (HTTP, token)"),
    "monitor": (1, "Ray's autoscaler metrics"),
    "dashboard": (2, "Ray's head agent without the dashboard"),
    "ray::IDLE": (1, "a worker that waits for work (gRPC, token)"),
    "ray::ServeController": (1, "Serve's controller (gRPC, token)"),
    "ray::ProxyActor": (2, "Serve's proxy: gRPC (token), and HTTP, the slower way in"),
    "ray::ServeReplica:tenuto:gateway": (5, "clients, operators, Python handles (token); gRPC (token)"),
    "ray::ServeReplica:gpulet": (3, "batches (token), gRPC (token)"),
}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def make_plan() -> Plan:
    latency = {"alpha_ms": 1.0, "beta_ms": 9.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "n0/0", "type": "v100"}],
            "gpulets": [
                {"id": "n0/0/a", "gpu": "n0/0",
                 "models": [{"name": "synthetic", "batch_size": 4, "latency": latency, "latency_ms": 13.0}]}
            ],
            "models": [{"name": "synthetic", "rate_rps": 100, "slo_ms": 200, "latency": latency}],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def running(launcher: Launcher) -> Launcher:
    launcher.apply(serve_config(make_plan(), port=PORT, scheduler="eager"))
    return launcher


def listening() -> list[tuple[str, str, int]]:
    """Kind of process, address and port of every TCP socket that this run's processes listen on."""
    import psutil  # Ray brings it

    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections, command = process.net_connections("tcp"), " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        kind = _kind(process.pid, command)
        found += [(kind, c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
    return found


def _kind(pid: int, command: str) -> str:
    if pid == os.getpid():
        return "driver"
    for name in ("autoscaler/_private/monitor.py", "dashboard/dashboard.py"):
        if name in command:
            return name.split("/")[-1].removesuffix(".py")
    # Ray's processes are called after what they do just now: ray::ServeController.listen_for_change.
    return next((kind for kind in KNOWN if command.startswith(kind) or f"/{kind} " in command), command)


def test_every_socket_is_known_and_of_this_machine_alone(running: Launcher) -> None:
    assert infer(running.base_url)[0] == 200
    sockets = listening()
    by_process: dict[str, int] = {}
    everywhere = []
    for kind, address, port in sockets:
        assert kind in KNOWN, f"{kind} listens on {address}:{port}, and nobody knows what for"
        by_process[kind] = by_process.get(kind, 0) + 1
        if address not in LOOPBACK:
            everywhere.append((kind, address, port))
    # Serve binds the gRPC server of every replica to all interfaces, and has no setting for that (Ray 2.60).
    assert {kind for kind, _, _ in everywhere} <= {"ray::ServeReplica:tenuto:gateway", "ray::ServeReplica:gpulet"}
    for _, _, port in everywhere:
        assert _asked_without_token(port) == "UNAUTHENTICATED"
    assert by_process["ray::ServeReplica:tenuto:gateway"] <= KNOWN["ray::ServeReplica:tenuto:gateway"][0]


def _asked_without_token(port: int) -> str:
    """What Serve's gRPC of a replica says to a stranger."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"", timeout=60)
    return str(refused.value.code().name)


def test_rays_http_takes_no_job_from_a_stranger(running: Launcher) -> None:
    """Whatever of Ray speaks HTTP refuses a job without the token, and at least one does."""
    del running
    rays = [(kind, port) for kind, _, port in listening() if kind in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    said = {(kind, port): _said_to_a_job(port) for kind, port in rays}
    assert not {place: status for place, status in said.items() if status is not None and status < 400}
    assert {401, 403} & set(said.values())


def _said_to_a_job(port: int) -> int | None:
    """The status that a job without a token gets; None from what does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/api/job_agent/jobs/", b'{"entrypoint": "true"}', headers)
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()


def test_operators_have_a_port_beside_the_clients(running: Launcher) -> None:
    assert running.operator_url == f"http://127.0.0.1:{PORT + 2}"
    status = get_json(f"{running.operator_url}/status")
    assert status["events"][-1]["what"] == "plan applied"
    (gpulet,) = status["gpulets"]
    assert gpulet["busy_s"] > 0.0
    assert get_json(f"{running.operator_url}/v2/health/ready") == {"ready": True}
