"""Protection of ports that ask for no key against requests of other sites (CSRF, cross-origin, DNS rebinding): their
pages must not reach these ports through a browser of this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from functools import cache


def refusal_reason(headers: Mapping[str, str], names: Collection[str] = ()) -> str | None:
    """Return why a request may come from a page of another site; None if it does not.

    Such a page can let its own name point to 127.0.0.1 (DNS rebinding); then Host has that name. It can also send
    requests across sites; then browsers say so in Origin or Sec-Fetch-Site. To follow a link to this server is allowed.

    Args:
        headers: the request's headers by lower-case name.
        names: further names that clients may call this server, in lower case.
    """
    host = headers.get("host", "").lower()
    name = host.removesuffix(f":{host.rpartition(':')[2]}") if not host.endswith("]") else host
    if host and name not in names and not _is_of_this_machine(name.strip("[]")):
        return f"Host '{host}' is no name of this machine. Ask for 127.0.0.1 or localhost, or name it with --host-name."
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host:
        return f"a page of '{origin}' may not ask here."
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate":
        return "a page of another site may not ask here."
    return None


def _is_of_this_machine(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", _own_name())
    return True


@cache
def _own_name() -> str:
    return socket.gethostname().lower()
