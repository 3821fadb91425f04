"""Every listening socket of a running system is known, bound to this machine, and closed to whoever has no token."""

import http.client
import json
from pathlib import Path

import pytest

from tenuto.deployments.process.ray_token import guard_of
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tests.instruments.live import bring_up, infer
from tests.instruments.plans import make_plan
from tests.instruments.sockets import check_sockets, listening

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

PORT = unused_port()


@pytest.fixture(scope="module")
def running(launcher: Launcher) -> Launcher:
    plan = make_plan({"n0/0/a": (100.0, ["synthetic"])}, slo_ms=200.0)
    bring_up(launcher, Deployment(plan=plan, port=PORT, scheduler="eager", log_json=True).config())
    return launcher


def test_every_socket_is_known_and_of_this_machine_alone(running: Launcher) -> None:
    assert infer(running.base_url)[0] == 200
    assert {"ray::ServeReplica:tenuto:gateway", "ray::ServeReplica:gpulet"} <= {each.kind for each in check_sockets()}


def test_rays_head_asks_for_the_token(running: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    del running
    address = ray.get_runtime_context().gcs_address
    assert guard_of(address) == "ours"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert guard_of(address) == "theirs"


def test_rays_http_takes_no_job_from_a_stranger(running: Launcher) -> None:
    """Whatever of Ray speaks HTTP refuses a job without the token, and at least one does."""
    del running
    kinds = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    job = "POST", "/api/job_agent/jobs/", b'{"entrypoint": "true"}'
    said = {each: _status(each.port, *job) for each in listening() if each.kind in kinds}
    assert not {place: status for place, status in said.items() if status is not None and status < 400}
    assert {401, 403} & set(said.values())


def test_serves_proxies_lead_nowhere(running: Launcher) -> None:
    del running
    proxies = [each.port for each in listening() if each.kind == "ray::ProxyActor"]
    for path in ("/v2", "/v2/health/live"):
        assert {_status(port, "GET", path, None) for port in proxies} - {None} == {404}


def _status(port: int, method: str, path: str, body: bytes | None) -> int | None:
    """The status that a request without a token gets; None from what does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()


def test_logs_are_json_with_one_line_per_event_and_none_per_request(running: Launcher) -> None:
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    events = {"replica_tenuto_gateway": "is connected", "replica_gpulet": "is ready up to batch 8"}

    def lines_of(kind: str) -> list[dict[str, str]]:
        newest = max(folder.glob(f"{kind}*.log"), key=lambda file: file.stat().st_ctime)
        return [json.loads(line) for line in newest.read_text().splitlines()]

    before = {kind: lines_of(kind) for kind in events}
    for kind, event in events.items():
        assert any(event in line["message"] for line in before[kind])
        assert all({"levelname", "asctime", "replica"} <= line.keys() for line in before[kind])
    for _ in range(10):
        assert infer(running.base_url)[0] == 200
    assert {kind: len(lines_of(kind)) - len(before[kind]) for kind in events} == dict.fromkeys(events, 0)


def test_operators_have_a_port_beside_the_clients(running: Launcher) -> None:
    assert running.operator_url == f"http://127.0.0.1:{PORT + 2}"
    status = get_json(f"{running.operator_url}/status")
    assert status["events"][-1]["what"] == "plan applied"
    (gpulet,) = status["gpulets"]
    assert gpulet["busy_s"] > 0.0
    assert get_json(f"{running.operator_url}/v2/health/ready") == {"ready": True}
