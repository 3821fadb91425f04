"""Which sender a load client uses."""

from __future__ import annotations

from tenuto.loadgen.client import ClientJob
from tenuto.loadgen.senders.http import HttpSender, Sender

__all__ = ["make_sender"]


def make_sender(job: ClientJob) -> Sender:
    """Return the sender for a job's `via`; the handle's parts are imported only where it is used."""
    if job.via == "handle":
        from tenuto.loadgen.senders.handle import HandleSender

        return HandleSender()
    return HttpSender(job.url)
