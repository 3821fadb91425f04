"""Who may ask, how often, and what nobody but operators is told: over a gateway's own sockets, before bodies come."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tenuto.deployments.entry.service.traces import Traces
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import CLIENT_KEY, client_key, model_metadata
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import Listen, read_gateway_config
from tenuto.errors import InvalidInputError
from tenuto.loadgen.sender import Body, Reply
from tenuto.loadgen.senders.http_sender import HttpSender
from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench
from tests.instruments.asking import PATIENCE_S

KEYS = {"anna": "key of anna", "ben": "key of ben"}
OPERATORS_ONLY = ("/status", "/status/queue", "/requests", "/metrics", "/live", "/")


def entry(name: str, **rest: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **rest}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A gateway that knows Anna, who may ask `m`, and Ben, who may ask twice; operators have a port of their own."""
    made = Bench()
    made.operators = unused_port()  # type: ignore[attr-defined]
    await made.start(
        PLAN,
        keys=[entry("anna", models=["m"]), entry("ben", rate_rps=0.001, burst=2)],
        operators={"host": "127.0.0.1", "port": made.operators},  # type: ignore[attr-defined]
    )
    yield made
    await made.close()


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def test_a_key_opens_its_models_and_no_others(bench: Bench) -> None:
    assert (await bench.infer(Authorization=f"Bearer {KEYS['anna']}")).status_code == 200
    assert (await bench.infer(X_Api_Key=KEYS["anna"])).status_code == 200
    other = await bench.infer("n", X_Api_Key=KEYS["anna"])
    assert (other.status_code, other.json()["error"]) == (403, "the key of 'anna' is not for model 'n'.")
    assert (await bench.client.get("/v2/models/n", headers=bearer("anna"))).status_code == 403
    assert (await bench.client.get("/v2/models/m", headers=bearer("anna"))).status_code == 200


@pytest.mark.parametrize("path", ["/v2/models/n", "/v2%2Fmodels/n", "/v2/mode%6cs/n", "/v2/models/n/versions/1/stats"])
async def test_no_way_of_writing_a_path_shows_another_clients_model(bench: Bench, path: str) -> None:
    assert (await bench.client.get(path, headers=bearer("anna"))).status_code == 403


async def test_lists_name_the_models_of_the_key_alone(bench: Bench) -> None:
    for name, models in (("anna", ["m"]), ("ben", ["m", "n"])):
        index = await bench.client.post("/v2/repository/index", headers=bearer(name))
        assert [model["name"] for model in index.json()] == models
    statistics = await bench.client.get("/v2/models/stats", headers=bearer("anna"))
    assert [model["name"] for model in statistics.json()["model_stats"]] == ["m"]
    await bench.follow(PLAN, keys=[entry("anna", models=["m", "secret*"])])
    unknown = await bench.client.get("/v2/models/secrets", headers=bearer("anna"))
    assert (unknown.status_code, unknown.json()["error"]) == (404, "Request for unknown model: 'secrets' is not found.")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}])
async def test_without_a_key_there_is_nothing_but_health(bench: Bench, headers: dict[str, str]) -> None:
    client, body = bench.client, {"inputs": [TENSOR]}
    paths = ("/v2", "/v2/models/m", "/v2/models/unknown", "/docs", "/openapi.json", *OPERATORS_ONLY)
    asked = [client.get(path, headers=headers) for path in paths]  # all at once: wrong keys wait
    # Nobody without a key learns which models there are.
    asked += [client.post(f"/v2/models/{model}/infer", json=body, headers=headers) for model in ("m", "unknown")]
    for answer in await asyncio.gather(*asked):
        assert answer.status_code == 401, answer.url
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v2/health/live", "/health"):
        assert (await bench.client.get(path, headers=headers)).status_code == 200


async def test_a_key_is_checked_before_the_body_is_read(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    assert bench.entry.server.status().unfinished_bytes == 0
    writer.close()


async def test_our_own_clients_show_the_key_of_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    url, replies = f"http://127.0.0.1:{bench.port}", asyncio.Queue[Reply]()
    refused = await asyncio.to_thread(model_metadata, url, "m")
    assert refused["error"].startswith("no key")
    monkeypatch.setenv(CLIENT_KEY, KEYS["anna"])
    assert (await asyncio.to_thread(model_metadata, url, "m"))["name"] == "m"
    sender = HttpSender(url, client_key())
    await sender.open(1, lambda _token, reply: replies.put_nowait(reply))
    sender.send(sender.prepare("m", Body(json.dumps({"inputs": [TENSOR]}).encode())), "one", 1)
    assert (await asyncio.wait_for(replies.get(), PATIENCE_S)).status == 200
    sender.close()


async def test_a_client_above_its_rate_is_told_when_to_come_back(bench: Bench) -> None:
    for _ in range(2):
        assert (await bench.infer(X_Api_Key=KEYS["ben"])).status_code == 200
    refused = await bench.infer(X_Api_Key=KEYS["ben"])
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 1000
    assert (await bench.infer(X_Api_Key=KEYS["anna"])).status_code == 200
    status = await operators(bench, "/status")
    assert status["front_door"]["turned_away"] == {"rate": 1}


async def operators(bench: Bench, path: str) -> Any:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.get(f"http://127.0.0.1:{bench.operators}{path}")  # type: ignore[attr-defined]
        assert answer.status_code == 200, path
        return answer.json() if "json" in answer.headers["content-type"] else answer.text


async def test_operators_have_a_port_of_their_own_and_clients_none_of_it(bench: Bench) -> None:
    await operators(bench, "/live")  # its figures are of what comes from here on
    await bench.infer(X_Api_Key=KEYS["anna"], X_Request_Id="annas own")
    for path in OPERATORS_ONLY:
        assert (await bench.client.get(path, headers=bearer("ben"))).status_code in (404, 429), path
    (request,) = await operators(bench, "/requests?id=annas+own")
    assert request["outcome"] == "ok"
    async with asyncio.timeout(PATIENCE_S):
        while (await operators(bench, "/live"))["window"]["models"]["m"]["attainment"] != 1.0:
            await asyncio.sleep(0.05)
    assert "tenuto_request_duration_seconds_bucket" in await operators(bench, "/metrics")
    assert await operators(bench, "/status/queue") == {"m": 0, "n": 0}
    assert "<title>Tenuto</title>" in await operators(bench, "/")


async def test_what_a_proxy_in_front_took_counts_against_the_deadline(bench: Bench) -> None:
    assert bench.entry.service is not None
    now_s = time.time()
    headers = {"X_Api_Key": KEYS["anna"], "X_SLO_Ms": "20000"}
    assert (await bench.infer(**headers, X_Request_Start=f"t={now_s - 2.0:.3f}")).status_code == 200
    assert (await bench.infer(**headers, X_Request_Start=f"{1000 * (now_s - 30.0):.0f}")).status_code == 504
    assert (await bench.infer(**headers, X_Request_Start="yesterday")).status_code == 200
    status = await operators(bench, "/status")
    assert sum(status["models"]["m"]["proxy_s"]["counts"]) == 2
    assert status["models"]["m"]["submitted"] == 3


async def test_what_is_absurd_is_refused_with_the_cure(bench: Bench) -> None:
    own = bearer("anna")
    for path in ("/v2/models/m/versions/2", "/v2/models/m/versions/2/ready", "/v2/models/m/versions/x/stats"):
        assert (await bench.client.get(path, headers=own)).status_code == 404
    assert (await bench.client.post("/v2/models/m/versions/2/infer", json={}, headers=own)).status_code == 404
    for priority in (-1, 1.5, True, "high"):
        document = {"inputs": [TENSOR], "parameters": {"priority": priority}}
        ordered = await bench.infer(document=document, X_Api_Key=KEYS["anna"])
        assert (ordered.status_code, "priority" in ordered.json()["error"]) == (400, True)
    for slo in ("nan", "inf", "1e308", "3600001", "9" * 5000):
        assert (await bench.infer(X_Api_Key=KEYS["anna"], X_SLO_Ms=slo)).status_code == 400, slo
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for limit in ("0", "-1", "4097", "9" * 400, "nan"):
            url = f"http://127.0.0.1:{bench.operators}/requests?limit={limit}"  # type: ignore[attr-defined]
            assert (await client.get(url)).status_code == 400, limit


async def test_statistics_of_the_protocol_have_times(bench: Bench) -> None:
    await bench.infer(X_Api_Key=KEYS["anna"])
    (found,) = (await bench.client.get("/v2/models/m/stats", headers=bearer("anna"))).json()["model_stats"]
    stats = found["inference_stats"]
    assert stats["success"]["count"] == stats["queue"]["count"] == 1
    assert stats["success"]["ns"] > stats["queue"]["ns"] > 0
    assert stats["compute_infer"]["ns"] == 1_000_000  # what the gpu-let says
    assert found["last_inference"] > 0


async def test_a_gateway_reads_the_key_file_of_its_node_and_refuses_one_without_keys(
    bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    config = {"plan": PLAN.to_data(), "keys": [entry("anna")], "key_file": str(file)}
    with pytest.raises(InvalidInputError, match="no such file"):
        read_gateway_config(config)
    file.write_text("keys: []")
    with pytest.raises(InvalidInputError, match="holds no keys"):
        read_gateway_config({**config, "keys": []})
    file.write_text(json.dumps({"keys": [entry("ben")]}))
    await bench.entry.follow(read_gateway_config(config))
    for name in ("anna", "ben"):
        assert (await bench.infer(X_Api_Key=KEYS[name])).status_code == 200
    assert (await bench.infer()).status_code == 401


async def test_an_exposed_socket_needs_keys_and_operators_stay_at_home() -> None:
    plan = PLAN.to_data()
    exposed = {"host": "0.0.0.0", "port": 8000}
    with pytest.raises(InvalidInputError, match="`tenuto key NAME`"):
        read_gateway_config({"plan": plan, "listen": exposed})
    with pytest.raises(InvalidInputError, match="Bind it to 127"):
        read_gateway_config({"plan": plan, "keys": [entry("anna")], "listen": exposed, "operators": exposed})
    for rest in ({"keys": [entry("anna")]}, {"insecure": True}):
        config = read_gateway_config({"plan": plan, "listen": exposed, **rest})
        assert config.is_shared_with_clients
    Deployment(plan=PLAN, host="0.0.0.0", access={"key_file": "/not/on/this/node"}).config()
    made = Deployment(plan=PLAN, host="0.0.0.0", access={"insecure": True}).config()
    assert made.to_data()["http_options"]["host"] == "127.0.0.1"
    assert made.entry.user_config.operators == Listen(port=8002)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine's loopback address, for a day."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tenuto")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


async def test_tls_by_file(bench: Bench, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = unused_port()
    listen = {"host": "127.0.0.1", "port": port, "tls_cert": str(cert), "tls_key": str(key)}
    await bench.entry.follow(read_gateway_config({"plan": PLAN.to_data(), "listen": listen, "max_body_mib": 1}))
    trust = ssl.create_default_context(cafile=str(cert))
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=PATIENCE_S) as client:
        large = {"inputs": [{**TENSOR, "data": [1, 2]}], "parameters": {"note": "x" * 300_000}}
        for body in ({"inputs": [TENSOR]}, large):
            answer = await client.post("/v2/models/m/infer", json=body)
            assert answer.status_code == 200
    # A client that is refused in the middle of its body still reads why.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(
        b"POST /v2/models/m/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n"
    )
    writer.write(bytes(3 << 19))
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        await reader.readuntil(b"the body exceeds the limit of 1 MiB")
    writer.close()
    wrong = read_gateway_config(
        {"plan": PLAN.to_data(), "listen": {**listen, "port": unused_port(), "tls_cert": str(key)}}
    )
    with pytest.raises(InvalidInputError, match="PEM files"):
        await bench.entry.follow(wrong)


async def test_tls_comes_is_renewed_and_goes_on_the_same_port(bench: Bench, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = unused_port()
    plain = {"host": "127.0.0.1", "port": port}
    encrypted = {**plain, "tls_cert": str(cert), "tls_key": str(key)}

    async def serve(listen: dict[str, Any]) -> None:
        await bench.entry.follow(read_gateway_config({"plan": PLAN.to_data(), "listen": listen}))

    async def answers(trust: bytes | None) -> bool:
        verify = ssl.create_default_context(cadata=trust.decode()) if trust else True
        url = f"http{'s' if trust else ''}://127.0.0.1:{port}/v2"
        async with httpx.AsyncClient(verify=verify, timeout=PATIENCE_S) as client:
            try:
                return (await client.get(url)).status_code == 200
            except httpx.TransportError:
                return False

    await serve(plain)
    assert await answers(None)
    first = cert.read_bytes()
    await serve(encrypted)
    assert [await answers(None), await answers(first)] == [False, True]
    (tmp_path / "new").mkdir()
    for new, file in zip(certificate(tmp_path / "new"), (cert, key), strict=True):
        file.write_bytes(new.read_bytes())
        bench.entry.server.renew_certificates()  # between the two they do not belong together
    second = cert.read_bytes()
    assert [await answers(first), await answers(second)] == [False, True]
    cert.unlink()
    bench.entry.server.renew_certificates()
    assert await answers(second)
    await serve({**encrypted, "tls_cert": str(key)})  # a new plan with files that are none takes nothing away
    assert await answers(second)
    await serve(plain)
    assert [await answers(None), await answers(second)] == [True, False]


async def test_a_traced_request_tells_its_span_and_where_its_time_went(bench: Bench) -> None:
    exporter = InMemorySpanExporter()
    assert bench.entry.service is not None
    bench.entry.service.traces = Traces(exporter)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await bench.infer(X_Api_Key=KEYS["anna"], Traceparent=caller, X_Request_Id="one")
    late = await bench.infer(X_Api_Key=KEYS["anna"], Traceparent=caller, X_SLO_Ms="0")
    plain = await bench.infer(X_Api_Key=KEYS["anna"])
    assert (answer.status_code, late.status_code, plain.status_code) == (200, 504, 200)
    assert "traceparent" not in plain.headers
    bench.entry.service.traces.close()
    spans = exporter.get_finished_spans()
    whole, refused = (span for span in spans if span.name == "infer m")
    assert answer.headers["traceparent"] == f"00-{whole.context.trace_id:032x}-{whole.context.span_id:016x}-01"
    assert (whole.attributes["tenuto.request_id"], whole.attributes["tenuto.outcome"]) == ("one", "ok")
    assert refused.attributes["tenuto.outcome"] == "expired"
    stages = [span for span in spans if span.parent is not None and span.parent.span_id == whole.context.span_id]
    assert [span.name for span in stages] == ["batching", "gpulet_queue", "execution", "answering"]
    assert all(before.end_time <= after.start_time for before, after in itertools.pairwise(stages))
    assert whole.start_time <= stages[0].start_time
    assert stages[-1].end_time <= whole.end_time


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "models.example.com"}, 200),
        ({"Host": "Models.Example.com:443"}, 200),
        ({"Host": "evil.example.com"}, 403),
        ({"Host": "localhost.evil.example.com"}, 403),
        ({"Host": "127.0.0.1.evil.example.com"}, 403),
        ({"Host": "localhost", "Origin": "https://evil.example.com"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ],
)
async def test_where_no_key_is_asked_for_only_names_of_this_machine_are_answered(
    headers: dict[str, str], status: int
) -> None:
    made = Bench()
    await made.follow(PLAN, host_names=["models.example.com"])
    for path in ("/v2/health/live", "/v2", "/docs"):
        answer = await made.client.get(path, headers=headers)
        assert answer.status_code == status, path
        assert status == 200 or "evil" in answer.text or "another site" in answer.text
    refused = await made.client.post("/v2/models/m/infer", json={"inputs": [TENSOR]}, headers=headers)
    assert (refused.status_code == 403) == (status == 403)
    await made.close()


async def test_wrong_keys_wait_and_right_ones_do_not(bench: Bench) -> None:
    wrong = {"X-Api-Key": "wrong"}
    for _ in range(5):
        assert (await bench.client.get("/v2", headers=wrong)).status_code == 401
    slowed = asyncio.create_task(bench.client.get("/v2", headers=wrong))
    while bench.entry.service.guesses.total < 6:
        await asyncio.sleep(0)
    assert (await bench.client.get("/v2", headers=bearer("anna"))).status_code == 200
    assert not slowed.done()
    answer = await slowed
    assert (answer.status_code, answer.headers["connection"]) == (401, "close")
