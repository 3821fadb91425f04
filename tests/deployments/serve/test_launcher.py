"""Starting Ray: what went wrong, and ports that stay unused."""

import os
import socket
from typing import Any

import pytest

from tenuto.deployments.serve.launcher import check_port, start_local_ray, unused_port
from tenuto.errors import EnvironmentFaultError


def test_a_ray_that_does_not_start_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_busy(**_: Any) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("tenuto.deployments.serve.launcher.make_token", lambda: None)
    monkeypatch.setattr("ray.init", too_busy)
    with pytest.raises(EnvironmentFaultError, match="timed out during startup\nThis machine may be too busy"):
        start_local_ray(num_gpus=1)


def test_an_unused_port_is_the_one_wished_for_or_none_that_outgoing_connections_take() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = unused_port(taken.getsockname()[1])
    assert 20000 <= port < 32768
    assert unused_port(port) == port


def test_where_nobody_can_listen_is_said_with_the_option_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFaultError, match=rf"127.0.0.1:{port} is taken .* with --grpc-port"):
            check_port("127.0.0.1", port, "--grpc-port")
    check_port("127.0.0.1", port, "--grpc-port")
    with pytest.raises(EnvironmentFaultError, match=r"^192.0.2.1 is no IPv4 address of this machine .* with --host"):
        check_port("192.0.2.1", port, "--port")
