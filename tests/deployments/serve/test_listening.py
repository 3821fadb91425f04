"""What listens in a running system is closed to whoever has no token, and what it logs is JSON. That every socket is
known and bound to this machine is a test of `test_live_gateways.py`."""

import http.client
import json
from pathlib import Path

import pytest

from tenuto.deployments.process.ray_token import guard_of
from tenuto.deployments.serve.endpoint import get_json
from tests.instruments.live import infer
from tests.instruments.shared_deployment import SharedDeployment
from tests.instruments.sockets import listening

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]


@pytest.fixture
def url(shared_url: str) -> str:
    return shared_url


def test_rays_head_asks_for_the_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    del url
    address = ray.get_runtime_context().gcs_address
    assert guard_of(address) == "ours"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert guard_of(address) == "theirs"


def test_rays_http_takes_no_job_from_a_stranger(url: str) -> None:
    """Whatever of Ray speaks HTTP refuses a job without the token, and at least one does."""
    del url
    kinds = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    job = "POST", "/api/job_agent/jobs/", b'{"entrypoint": "true"}'
    said = {each: _status(each.port, *job) for each in listening() if each.kind in kinds}
    assert not {place: status for place, status in said.items() if status is not None and status < 400}
    assert {401, 403} & set(said.values())


def test_serves_proxies_lead_nowhere(url: str) -> None:
    del url
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


def test_logs_are_json_with_one_line_per_event_and_none_per_request(url: str) -> None:
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    events = {"replica_tenuto_gateway": "is connected", "replica_gpulet-n0-1-a": "is ready up to batch 4"}

    def lines_of(kind: str) -> list[dict[str, str]]:
        newest = max(folder.glob(f"{kind}*.log"), key=lambda file: file.stat().st_ctime)
        return [json.loads(line) for line in newest.read_text().splitlines()]

    before = {kind: lines_of(kind) for kind in events}
    for kind, event in events.items():
        assert any(event in line["message"] for line in before[kind])
        assert all({"levelname", "asctime", "replica"} <= line.keys() for line in before[kind])
    for _ in range(10):
        assert infer(url)[0] == 200
    assert {kind: len(lines_of(kind)) - len(before[kind]) for kind in events} == dict.fromkeys(events, 0)


def test_operators_have_a_port_beside_the_clients(shared: SharedDeployment, url: str) -> None:
    assert infer(url)[0] == 200
    operators = shared.operator_url
    assert operators == f"http://127.0.0.1:{int(url.rpartition(':')[2]) + 2}"
    status = get_json(f"{operators}/status")
    assert "plan applied" in {event["what"] for event in status["events"]}
    assert max(gpulet["busy_s"] for gpulet in status["gpulets"]) > 0.0
    assert get_json(f"{operators}/v2/health/ready") == {"ready": True}
