"""What a running system listens with: every TCP socket of this run's processes, held to what is known."""

import os
from collections import Counter
from typing import NamedTuple

__all__ = ["Listening", "check_sockets", "listening"]

# By the kind of a process: how many TCP sockets it has at most, and what they are for.
KNOWN = {
    "driver": (1, "the core worker of whoever started it (gRPC, token)"),
    "gcs_server": (1, "Ray's head (gRPC, token)"),
    "raylet": (2, "Ray's node manager and object manager (gRPC, token)"),
    "ray::DashboardAgent": (4, "Ray's agent: gRPC, metrics, and HTTP that takes jobs (token)"),
    "ray::RuntimeEnvAgent": (1, "Ray's preparation of environments (HTTP, token)"),
    "monitor": (1, "Ray's autoscaler metrics"),
    "dashboard": (2, "Ray's head agent without the dashboard"),
    "ray::IDLE": (1, "a worker that waits for work (gRPC, token)"),
    "ray::ServeController": (2, "Serve's controller (gRPC, token)"),
    "ray::ProxyActor": (3, "Serve's proxy: gRPC (token), and HTTP, which leads nowhere"),
    "ray::ServeReplica:tenuto:gateway": (5, "clients, operators, Python handles (token); gRPC (token)"),
    "ray::ServeReplica:gpulet": (3, "batches (token), gRPC (token)"),
    "ray::ServeReplica:dispatcher": (3, "bundles (token), gRPC (token)"),
    "ray::ServeReplica:tenuto-control": (3, "gRPC (token)"),
}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
# Serve binds the gRPC server of every replica to all interfaces, and has no setting for that (Ray 2.60).
EVERYWHERE = "ray::ServeReplica:"


class Listening(NamedTuple):
    """One socket: the kind of its process and its pid, its address and port."""

    kind: str
    pid: int
    address: str
    port: int

    @property
    def is_reachable(self) -> bool:
        """Whether other machines reach it."""
        return self.address not in LOOPBACK


def check_sockets() -> list[Listening]:
    """Return all sockets that listen, once each of them is known, and whatever others can reach refuses strangers."""
    sockets = listening()
    for kind, pid, address, port in sockets:
        assert kind in KNOWN, f"{kind} ({pid}) listens on {address}:{port}, and nobody knows what for"
    for (kind, pid), count in Counter((each.kind, each.pid) for each in sockets if each.kind != "driver").items():
        assert count <= KNOWN[kind][0], f"{kind} ({pid}) listens on {count} ports: {KNOWN[kind][1]}"
    for each in sockets:
        if each.is_reachable:
            assert each.kind.startswith(EVERYWHERE), f"{each} can be reached from elsewhere"
            assert _said_to_a_stranger(each.port) == "UNAUTHENTICATED", f"{each} lets strangers in"
    return sockets


def _said_to_a_stranger(port: int) -> str:
    """Return what Serve's gRPC of a replica says to one without a token."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=60)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "let in"


def listening() -> list[Listening]:
    """Return every TCP socket that this run's processes listen on."""
    import psutil  # Ray brings it

    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections, command = process.net_connections("tcp"), " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        kind = _kind(process.pid, command)
        found += [
            Listening(kind, process.pid, c.laddr.ip, c.laddr.port)
            for c in connections
            if c.status == psutil.CONN_LISTEN
        ]
    return found


def _kind(pid: int, command: str) -> str:
    if pid == os.getpid():
        return "driver"
    for name in ("autoscaler/_private/monitor.py", "dashboard/dashboard.py"):
        if name in command:
            return name.split("/")[-1].removesuffix(".py")
    # Ray's processes are called after what they do just now: ray::ServeController.listen_for_change.
    return next((kind for kind in KNOWN if command.startswith(kind) or f"/{kind} " in command), command)
