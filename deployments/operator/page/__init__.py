"""The live page: one HTML file without outside resources, and what browsers may do with it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import NamedTuple


class Page(NamedTuple):
    """The page and the Content-Security-Policy that goes with it."""

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """Return the page. Its own script may run, no other: names that come from plans and clients stay text."""
    html = resources.files(__package__).joinpath("live.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)
