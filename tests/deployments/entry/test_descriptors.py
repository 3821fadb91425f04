"""A gateway whose process may open few files: places follow the limit, and who is silent gives way to who asks."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.http.file_descriptors import most_connections
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tests.deployments.entry.test_access import certificate
from tests.instruments.asking import until
from tests.instruments.plans import make_plan

FILES = 200
SILENT = 230  # clients: more than there are files
PROGRAM = """
import asyncio, resource, sys
import uvloop
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.serve.user_config import read_gateway_config
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan

async def main(files, port, cert, key):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    entry = Entry(finder({"a": FakeGpulet("a", ("m",))}))
    encrypted = {"host": "127.0.0.1", "port": int(port), "tls_cert": cert, "tls_key": key}
    plan = make_plan(("a", ("m",))).to_data()
    await entry.follow(read_gateway_config({"plan": plan, "scheduler": {"name": "eager"}, "listen": encrypted}))
    print("ready", flush=True)
    await asyncio.sleep(3600)

uvloop.run(main(*sys.argv[1:]))
"""
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_places_follow_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _path: ["descriptor"] * 40)  # a server's, not the tests' process's

    def places(limit: int, most: int = 1000, held: int = 0) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _name: (limit, limit))
        return most_connections(most, held)

    assert places(1 << 20) == places(resource.RLIM_INFINITY) == 1000
    assert 8 <= places(512) < 512 - 96
    assert places(1024) > places(512) > places(256) >= places(16) == 8
    assert places(512, held=10) == places(512) + 8  # four for each handshake
    assert places(512, most=20) == 20

    def none_left(_path: str) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", none_left)
    assert places(512) == 8


@pytest.mark.parametrize("says", ["hello", "nothing"])
def test_new_clients_are_answered_however_many_are_silent(tmp_path: Path, says: str) -> None:
    port = unused_port()
    trust = ssl.create_default_context(cafile=str(certificate(tmp_path)[0]))
    command = [sys.executable, "-c", PROGRAM, str(FILES), str(port)]
    with subprocess.Popen(
        [*command, str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            silent: list[socket.socket] = []
            for _ in range(SILENT):
                made = socket.create_connection(("127.0.0.1", port))
                with contextlib.suppress(OSError):  # all places are those of clients that shake hands just now
                    silent.append(trust.wrap_socket(made, server_hostname="127.0.0.1") if says == "hello" else made)
            for _ in range(20):
                with (
                    socket.create_connection(("127.0.0.1", port)) as plain,
                    trust.wrap_socket(plain, server_hostname="127.0.0.1") as client,
                ):
                    client.sendall(REQUEST)
                    assert client.recv(12) == b"HTTP/1.1 200"
            for each in silent:
                each.close()
        finally:
            server.kill()


async def test_a_gateway_and_a_gpulet_that_are_closed_leave_no_descriptor_although_something_holds_them() -> None:
    """As FastAPI does, which caches what the functions of an application refer to."""
    plan = make_plan({"n0/0/a": (50.0, ["m"])})
    (planned,) = Deployment(plan=plan, executor="emulated").config().gpulets
    closed, descriptors = list[object](), list[int]()
    for _ in range(3):
        gpulet = await LocalReplica.start(planned.spec, planned.user_config)
        entry = Entry(lambda _name, gpulet=gpulet: gpulet.endpoint)
        listen = {"host": "127.0.0.1", "port": unused_port()}
        await entry.follow(
            read_gateway_config({"plan": plan.to_data(), "scheduler": {"name": "eager"}, "listen": listen})
        )
        await until(lambda entry=entry: entry.service.dispatching.is_ready())
        await entry.close()
        await gpulet.close()
        closed += [entry, gpulet]
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[1:] == descriptors[:1] * 2
