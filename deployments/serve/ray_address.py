"""Whether a Ray cluster answers at an address, asked before Ray is: `ray.init` takes 80 s to give up on a wrong one and
then ends the process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["why_unreachable"]

# What opens any HTTP/2 connection (RFC 9113 §3.4): the preface and an empty SETTINGS frame, which the server answers
# with a SETTINGS frame. Ray speaks gRPC, which is HTTP/2.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def why_unreachable(address: str, timeout_s: float = 5.0) -> str | None:
    """Return why no Ray cluster can be at an address; None when one may be, or when the address is Ray's to resolve.

    Args:
        address: `host:port`, `ray://host:port`, or `auto`: what RAY_ADDRESS or this machine's last Ray says.
        timeout_s: for the connection, and again for the first answer.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _last_started()
    bare = address.removeprefix("ray://")
    host, _, port = bare.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        return None if address in ("", "auto", "local") else f"'{address}' is not host:port"
    reason = _why_not_ray(host.strip("[]"), int(port), timeout_s)
    if reason is None and not address.startswith("ray://") and host in _LOOPBACK:
        import ray

        # Ray puts this machine's address in place of a loopback one, and a Ray of this machine alone is not there.
        own = ray.util.get_node_ip_address()
        if own not in _LOOPBACK and (elsewhere := _why_not_ray(own, int(port), timeout_s)) is not None:
            return f"Ray looks for {bare} at {own}, and {elsewhere}; start it with --node-ip-address={own}"
    return reason


def _why_not_ray(host: str, port: int, timeout_s: float) -> str | None:
    shown = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return None  # the server waits for TLS first
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except TimeoutError:
        return f"{shown} does not answer within {timeout_s:g} s"
    except (OSError, OverflowError) as error:
        return f"{shown}: {getattr(error, 'strerror', None) or error}"
    if len(answer) < 4 or answer[3] != _SETTINGS:
        return f"something else than Ray listens at {shown}"
    return None


def _last_started() -> str:
    """Ray writes the address of the cluster that was started last into its folder."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    try:
        return (folder / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
