"""Questions to a running server show the key to that server only."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import msgspec
import pytest

from tenuto.deployments.serve.endpoint import CLIENT_KEY, get_json, get_told, model_metadata
from tenuto.deployments.wire.status import SystemStatus
from tenuto.errors import EnvironmentFaultError, InvalidInputError


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


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\x1b[2J\x00\xff",
    "no status": b"HTTP/1.1 abc\r\n\r\n",
    "a version to come": b"HTTP/9.9 200 OK\r\n\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 1000 + b"\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
    "chunks that are none": _CHUNKED + b"zz\r\n",
    "half a chunk": _CHUNKED + b"100\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{",
    "another document": http(b"[]"),
    "nothing in JSON": http(b"null"),
    "depth": http(b"[" * 100_000),
    "depth in an object": http(b'{"plan": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001),
    "no text": http(b'{"error": "\xff\xfe"}', 500),
    "an error of another kind": http(b'{"error": 5}', 500),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_whatever_answers_is_refused_as_no_server_of_ours(kind: str) -> None:
    """Never with an internal error, and never with what would move a terminal's cursor."""

    def answer() -> None:
        for _ in range(2):
            connected, _ = listening.accept()
            with connected, contextlib.suppress(OSError):
                connected.recv(65536)
                connected.sendall(ANSWERS[kind])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(EnvironmentFaultError) as caught:
            get_told(f"{url}/status", SystemStatus, 60.0)
        assert str(caught.value).isprintable()
        with contextlib.suppress(EnvironmentFaultError):  # an error is shown to whoever asks for metadata
            assert "error" in model_metadata(url, "m")


@pytest.mark.parametrize("url", ["ftp://a/", "http://", "http:///status", "http://a:b/", "http://[::1/", "http:a"])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="is not the address of a server"):
        get_json(url)


class Endless(Redirecting):
    """Answers without end: as fast as it is read at /fast, elsewhere a byte, or an interim answer, now and then."""

    def do_GET(self) -> None:
        part, pause_s = {"/fast": (b" " * (1 << 20), 0.0), "/interim": (b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)}.get(
            self.path, (b" ", 0.02)
        )
        if self.path in ("/fast", "/slow", "/error"):
            self.send_response(500 if self.path == "/error" else 200)
            self.end_headers()
        elif self.path == "/header":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        with contextlib.suppress(OSError):
            while self.wfile.write(part):
                time.sleep(pause_s)


@pytest.mark.parametrize("path", ["/fast", "/slow", "/error", "/header", "/interim"])
def test_an_answer_without_end_is_given_up(path: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EnvironmentFaultError, match="over 64 MiB, or takes over"):
            get_json(f"http://127.0.0.1:{server.server_port}{path}", timeout_s=60.0 if path == "/fast" else 0.3)
        server.shutdown()
