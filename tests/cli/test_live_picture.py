"""`tenuto status --watch` shows what the live page shows, in as many lines as there are."""

import asyncio
import dataclasses
import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from tenuto.cli import main
from tenuto.cli.live_picture import picture
from tenuto.deployments.operator.live_view import LiveStatus
from tests.instruments.shown_status import ShownServer, WatchedServer


@pytest.fixture(scope="module")
def live() -> LiveStatus:
    """Fifty models on a hundred gpu-lets, twenty seconds after the first look."""

    async def watch() -> LiveStatus:
        watched = WatchedServer(ShownServer())
        await watched.view.look()
        await watched.sample(19)
        try:
            return await watched.view.look()
        finally:
            watched.view.close()

    return asyncio.run(watch())


def shown(live: LiveStatus, *, sort: str, lines: int) -> list[str]:
    console = Console(file=io.StringIO(), width=140, height=lines)
    console.print(picture(live, sort=sort, lines=lines))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_gpu_that_something_in_no_plan_holds_is_not_idle(live: LiveStatus) -> None:
    text = "\n".join(shown(replace(live, strays=["gpulet-spare-0-a"]), sort="name", lines=300))
    assert "idle GPUs" not in text
    assert "in no plan: gpulet-spare-0-a" in text


@pytest.mark.parametrize("lines", [24, 50, 300])
def test_a_picture_fits_and_says_what_it_leaves_out(live: LiveStatus, lines: int) -> None:
    text = shown(live, sort="attainment", lines=lines)
    assert len(text) <= lines
    assert text[0].startswith("last 10 s: goodput ")
    assert text[0].endswith("gpu-lets 99 up, 1 down   emulated GPUs")
    assert "idle GPUs: spare/0" in text
    assert "idle until somebody asks: rare" in text
    models = [line for line in text if line.startswith("network_")]
    gpulets = [line for line in text if line.startswith("n0/")]
    hidden = [line for line in text if line.startswith("…")]
    assert (len(models) < 50) + (len(gpulets) < 100) == len(hidden)
    assert gpulets[0].split()[-1] == "down"
    assert "network_07 comes at 1.4 times its planned rate" in text[-3]
    assert "hold 0.7, defend 1 after 12 rehearsals; expected of the last change: requests lost -0.8 %" in text[-4]


def test_the_worst_come_first(live: LiveStatus) -> None:
    first = shown(live, sort="attainment", lines=60)[2]
    assert first.split()[0] in {f"network_{index:02d}" for index in range(3, 50, 11)}
    assert shown(live, sort="name", lines=60)[2].startswith("network_00")
    assert shown(live, sort="rate", lines=60)[2].startswith("network_4")


def test_once_it_says_what_was_turned_away(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tenuto.deployments.serve.endpoint.get_told", lambda *_: ShownServer().status())
    with pytest.raises(SystemExit):
        main(["status"])
    assert "turned away at the door: key 3, rate 5; wrong keys: 2\n" in capsys.readouterr().out


def test_into_a_file_nothing_is_cut(
    live: LiveStatus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = live.window.gpulets
    name = "a-node-with-a-very-long-name-of-its-own.example.org/0/a"
    first = replace(live.gpulets[0], id=name, models={f"network_{index:02d}": 32 for index in range(50)})
    shown = replace(
        live,
        gpulets=[first, *live.gpulets[1:]],
        window=dataclasses.replace(live.window, gpulets=figures | {name: figures[live.gpulets[0].id]}),
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tenuto.deployments.serve.endpoint.get_told", lambda *_: shown)
    with pytest.raises(SystemExit):
        main(["status", "--watch"])
    out = capsys.readouterr().out
    assert "…" not in out
    assert {gpulet.id for gpulet in shown.gpulets} | shown.models.keys() <= {*out.split()}
    assert max(map(len, out.splitlines())) < 1000
