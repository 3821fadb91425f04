"""Questions to a running server show the key to that server only."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import msgspec
import pytest

from tenuto.deployments.serve.endpoint import CLIENT_KEY, get_json, get_told
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


class Answering(Redirecting):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


def test_answers_are_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that build msgspec's reader of one type at once crash the process, as `fleet check` did with two
    cells."""
    reading, most = 0, 0

    def decode(_body: bytes, type: object) -> object:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        time.sleep(0.02)  # others would come meanwhile
        reading -= 1
        return type

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server, ThreadPoolExecutor(4) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/status"
        assert list(pool.map(lambda _: get_told(url, dict), range(4))) == [dict] * 4
        server.shutdown()
    assert most == 1


class Endless(Redirecting):
    """Answers without end: as fast as it is read at /fast, a byte now and then at /slow."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        part, pause_s = (b" ", 0.02) if self.path == "/slow" else (b" " * (1 << 20), 0.0)
        with contextlib.suppress(OSError):
            while self.wfile.write(part):
                time.sleep(pause_s)


@pytest.mark.parametrize("path", ["/fast", "/slow"])
def test_an_answer_without_end_is_given_up(path: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EnvironmentFaultError, match="over 64 MiB, or takes over"):
            get_json(f"http://127.0.0.1:{server.server_port}{path}", timeout_s=0.3 if path == "/slow" else 60.0)
        server.shutdown()
