"""The live page in a real browser: 50 models on 100 gpu-lets, hostile names, a server that is not there."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from tenuto.deployments.operator.app import make_operator_app
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.status import SystemStatus
from tests.instruments.chromium import find_chromium, shown_dom
from tests.instruments.shown_status import ShownServer

needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")


class Watched:
    """A made-up server that has run for a minute and moves on a second with every look."""

    def __init__(self, shown: ShownServer) -> None:
        self._shown = shown

    def missing(self) -> list:
        return []

    async def status(self) -> SystemStatus:
        self._shown.second()
        return self._shown.status()

    async def waiting(self) -> dict:
        return {}

    async def ended(self, id: str | None, limit: int) -> list:
        return [{"id": id, "limit": limit}]


@contextmanager
def operators_port(shown: ShownServer) -> Iterator[str]:
    """Serve the operators' application on a port of this machine."""
    port = unused_port()
    config = uvicorn.Config(
        make_operator_app(Watched(shown)), host="127.0.0.1", port=port, log_level="error", ws="none", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@needs_browser
def test_every_model_and_gpu_let_is_shown_and_names_stay_text() -> None:
    shown = ShownServer()
    hostile = "<img src=x onerror=document.title='gone'>"
    shown.rename("network_00", hostile)
    with operators_port(shown) as url:
        dom, errors = shown_dom(url)
    assert errors == []
    assert "<title>Tenuto</title>" in dom
    assert 'data-shown="yes"' in dom
    table = dom[dom.index('<tbody id="models">') :]
    table = table[: table.index("</tbody>")]
    assert table.count("<tr>") == 50
    assert "&lt;img src=x onerror" in table
    assert "<img" not in dom
    assert (dom.count('class="share"'), dom.count('class="share down"')) == (99, 1)
    assert "1 gpu-let down" in dom
    sizes = dom[dom.index('<tbody id="sizes">') :]
    assert sizes[: sizes.index("</tbody>")].count("<tr>") == 4 * 3
    assert ">tokens 256</td>" in sizes
    assert ">25.0 %</td>" in sizes
    stages = dom[dom.index('<tbody id="applications">') :]
    stages = stages[: stages.index("</tbody>")]
    assert (stages.count('<tr class="stage">'), stages.count("<tr>")) == (4, 2)
    assert ">75.0 %</text>" in stages  # of the latency, the second stage
    assert stages.count('<td class="bad">') == 2  # it loses requests, and the first one does not
    assert '>spare/0</span><div class="shares"><div style="flex: 100 1 0' in dom  # idle, and drawn
    assert "; drained: n9/0; idle until somebody asks: rare" in dom
    assert ">drained</div>" in dom
    assert re.search(r'id="window">last \d+ s<', dom)
    assert "network_07 comes at 1.4 times its planned rate" in dom
    assert "n0/1/b: its process ended" in dom
