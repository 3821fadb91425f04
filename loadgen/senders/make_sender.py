"""The choice of a load client's sender."""

from __future__ import annotations

from tenuto.loadgen.sender import Sender
from tenuto.loadgen.senders.http_sender import HttpSender


def make_sender(via: str, url: str, key: str = "") -> Sender:
    """Return the sender: over `http` to a URL, with an API key if one is given; or over the Python `handle`, which is
    only imported then."""
    if via == "handle":
        from tenuto.loadgen.senders.handle_sender import HandleSender

        return HandleSender()
    return HttpSender(url, key)
