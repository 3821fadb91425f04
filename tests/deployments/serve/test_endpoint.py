"""Questions to a running server show the key to that server only."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tenuto.deployments.serve.endpoint import CLIENT_KEY, get_json
from tenuto.errors import EnvironmentFaultError


class Redirecting(BaseHTTPRequestHandler):
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(302)
        self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_redirect_is_not_followed_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_KEY, "secret")
    monkeypatch.setattr(Redirecting, "seen", [], raising=False)
    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EnvironmentFaultError, match="answered 302"):
            get_json(f"http://127.0.0.1:{server.server_port}/v2")
        server.shutdown()
    assert Redirecting.seen == ["/v2"]
