"""Which sender a load client uses."""

from __future__ import annotations

from tenuto.loadgen.sender import Sender
from tenuto.loadgen.senders.http_sender import HttpSender


def make_sender(via: str, url: str, key: str = "") -> Sender:
    """Return the sender over `http` to a URL, with an API key where one is given, or over the Python `handle`, whose
    parts are imported only where used."""
    if via == "handle":
        from tenuto.loadgen.senders.handle_sender import HandleSender

        return HandleSender()
    return HttpSender(url, key)
