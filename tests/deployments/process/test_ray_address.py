"""Wrong addresses are told in seconds, not after Ray's 80."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.deployments.process.ray_address import join_ray, why_unreachable


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def answer_once(listener: socket.socket, answer: bytes) -> threading.Thread:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_an_address_where_nobody_listens(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    assert why_unreachable(address) == f"{address}: Connection refused"
    assert why_unreachable(f"ray://{address}") == f"{address}: Connection refused"


def test_something_that_is_not_ray(listener: socket.socket) -> None:
    answering = answer_once(listener, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert "something else than Ray listens" in str(why_unreachable(address_of(listener)))
    answering.join()


def test_something_that_says_nothing(listener: socket.socket) -> None:
    assert "does not answer within 0.2 s" in str(why_unreachable(address_of(listener), 0.2))


def test_something_that_speaks_as_ray_does(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    answering = answer_once(listener, hello)
    assert why_unreachable(f"ray://{address_of(listener)}") is None
    answering.join()
    answering = answer_once(listener, hello)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    assert why_unreachable(address_of(listener)) is None
    answering.join()


def test_a_ray_on_loopback_alone_is_joined_there_and_after_it_no_other_unasked(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray._private import auto_init_hook, ray_constants

    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)

    answering = answer_once(listener, bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.9")
    monkeypatch.setattr("tenuto.deployments.process.ray_address.guard_of", lambda *_, **__: "open")
    seen: list[tuple[str, bool]] = []

    def init(*, address: str, **_options: Any) -> None:
        seen.append((address, ray_constants.ENABLE_RAY_CLUSTER))

    monkeypatch.setattr("ray.init", init)
    join_ray(address_of(listener))
    with pytest.raises(ray.exceptions.RaySystemError, match="not been started"):
        ray.get_actor("anybody")  # as a thread of Serve's may ask after the end
    assert seen == [(address_of(listener), False)]
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ
    answering.join()


@pytest.mark.parametrize("error", [RuntimeError("Version mismatch: 2.40.0"), SystemExit("no Ray")])
def test_a_ray_that_cannot_be_joined_is_told_as_such(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def init(**_options: Any) -> None:
        raise error

    answering = answer_once(listener, bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    monkeypatch.setattr("tenuto.deployments.process.ray_address.guard_of", lambda *_, **__: "open")
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConnectionError, match=str(error)):
        join_ray(address_of(listener))
    answering.join()


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":6379", "127.0.0.1:99999"])
def test_what_is_no_address(address: str) -> None:
    assert why_unreachable(address) is not None


def test_auto_is_what_the_user_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert why_unreachable("auto") is None  # there is none
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "127.0.0.1:9:" in str(why_unreachable("auto"))


def test_the_verb_ends_with_3_at_a_wrong_address(capsys: pytest.CaptureFixture[str], listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "--address", address])
    assert ended.value.code == 3
    assert f"no Ray cluster answers at {address}: {address}: Connection refused" in capsys.readouterr().err


def test_a_port_of_thousands_of_digits_is_no_port() -> None:
    assert "is not host:port" in str(why_unreachable("127.0.0.1:" + "1" * 5000))
