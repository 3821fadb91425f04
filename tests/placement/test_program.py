"""Merged groups and streaming as people see them: one row and one label per program."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tenuto.loadgen.report.palette import styles_for
from tenuto.placement import Plan
from tenuto.placement.shown.picture import JOINT, MOST_SINGLE_BARS, draw
from tenuto.placement.shown.table import compare_rows, rows_of

SVG = "{http://www.w3.org/2000/svg}"
LINE = {"alpha_ms": 1, "beta_ms": 4}


def replica(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "batch_size": 8, "rate_rps": 50, "memory_mib": 100, "latency": LINE, **more}


def plan(*gpulets: dict[str, Any], gpus: int = 1, streaming: bool = False) -> Plan:
    slos = {"cats": 100, "dogs": 80, "plain": 100}
    return Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": f"n0/{index}", "type": "v100"} for index in range(gpus)],
            "gpulets": [{"id": f"n0/{i}/a", "gpu": f"n0/{i % gpus}", **gpulet} for i, gpulet in enumerate(gpulets)],
            "models": [{"name": n, "source": "resnet50", "rate_rps": 9, "slo_ms": slo} for n, slo in slos.items()],
            "streaming": streaming,
        }
    )


MIXED = {
    "share_pct": 60,
    "merge": [["cats", "dogs"]],
    "models": [replica("cats"), replica("plain", copy_in_ms=0.5, copy_out_ms=0.25), replica("dogs", slowdown=1.5)],
}


def test_a_group_is_one_program_where_its_first_model_stands() -> None:
    (gpulet,) = plan(MIXED).gpulets
    merged, plain = gpulet.programs
    assert (merged.name, merged.is_joint, merged.batch_size, merged.rate_rps) == ("cats+dogs", True, 16, 100)
    assert [member.name for member in merged.members] == ["cats", "dogs"]
    assert merged.memory_mib == 200  # the sum, as equal weights were not measured
    assert merged.latency_ms == pytest.approx(1.5 * (16 + 3 * 4))  # worst: nine and seven, in three batches
    assert (plain.name, plain.is_joint, plain.batch_size) == ("plain", False, 8)
    group = {"models": ["cats", "dogs"], "batch_size": 6, "memory_mib": 120, "latency": LINE}
    unknown = [replica("cats", rate_rps=None), replica("dogs")]
    (measured,) = plan({"models": unknown, "merge": [group]}).gpulets[0].programs
    assert (measured.batch_size, measured.memory_mib, measured.latency_ms) == (6, 120, 10)
    assert measured.rate_rps is None


def test_the_table_has_one_row_per_program() -> None:
    merged, plain = rows_of(plan(MIXED, streaming=True))
    assert (merged.model, merged.batch_size, merged.slo_ms, merged.rate_rps) == ("cats+dogs", 16, 80, 100)
    assert (merged.hidden_ms, plain.hidden_ms) == (None, 6.0)  # joint batches do not stream
    assert [row.hidden_ms for row in rows_of(plan(MIXED))] == [None, None]


def test_a_comparison_says_in_which_group_a_model_runs() -> None:
    apart = {key: value for key, value in MIXED.items() if key != "merge"}
    table = dict(compare_rows({"merged": plan(MIXED, MIXED, gpus=2), "apart": plan(apart)}))
    assert table["cats"] == {"merged": "2×b16@60% in cats+dogs", "apart": "1×b8@60%"}
    assert table["plain"] == {"merged": "2×b8@60%", "apart": "1×b8@60%"}


def labels(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_picture_has_one_label_over_the_colours_of_a_group() -> None:
    svg = draw(plan(MIXED, streaming=True))
    shown = labels(svg)
    assert shown.count("cats+dogs") == 1
    assert "b16 · 60 %" in shown
    assert not {"cats", "dogs"} & set(shown)
    assert "several colours under one label: models that run as one program" in shown
    assert any(text.startswith("streaming:") for text in shown)
    root = ElementTree.fromstring(svg)
    strip = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "strip"]
    assert len({r.get("fill") for r in strip}) == 2
    (back,) = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == JOINT]
    assert back.get("width") == "100%"
    assert [r.get("width") for r in strip] == ["50.0%"] * 2
    tips = ["".join(t.itertext()) for g in root.iter(f"{SVG}g") for t in g.iter(f"{SVG}title")]
    assert tips == [
        "cats+dogs on n0/0/a: one program, joint batch 16, share 60 %, takes turns with plain, "
        "42 ms of 80 ms SLO, 100 rps, 200 MiB",
        "plain on n0/0/a: batch 8, share 60 %, takes turns with cats+dogs, 12 ms of 100 ms SLO, 6 ms of it copies that "
        "overlap, 50 rps, 100 MiB",
    ]


def test_bars_of_many_gpus_are_told_apart_by_what_is_merged() -> None:
    apart = {key: value for key, value in MIXED.items() if key != "merge"}
    some = MOST_SINGLE_BARS // 2
    shown = labels(draw(plan(*[MIXED] * some, gpus=some * 2 + 1)))
    assert shown.count(f"{some} GPUs") == 1
    models = [replica(name) for name in ("cats", "dogs")]
    whole, halves = {"models": models, "merge": [["cats", "dogs"]]}, {"models": [replica("plain")]}
    shown = labels(draw(plan(*[whole] * some, *[halves] * some, gpus=some * 2 + 1)))
    assert shown.count(f"{some} GPUs") == 2
    shown = labels(draw(plan(*[apart] * (some * 2 + 1), gpus=some * 2 + 1)))
    assert not any(text.startswith("several colours") for text in shown)


def test_pages_with_colours_of_their_own_show_the_same_programs() -> None:
    colours = {name: style.colour for name, style in styles_for(["cats", "dogs", "plain"]).items()}
    mixed = plan(MIXED, streaming=True)
    page = draw(mixed, colours)
    assert labels(page) == labels(draw(mixed))
    assert all(colour in page for colour in colours.values())


def test_gpulets_share_their_programs_until_one_holds_other_models() -> None:
    first = plan(MIXED).gpulets[0]
    moved = first.model_copy(update={"id": "n0/0/b", "memory_mib": 1000.0})
    assert moved.programs is first.programs
    assert moved.contents is first.contents
    larger = tuple(each.model_copy(update={"batch_size": 16, "memory_mib": 400.0}) for each in first.models)
    other, apart = first.model_copy(update={"models": larger}), first.model_copy(update={"merge": ()})
    assert [program.batch_size for program in other.programs] == [32, 16]
    assert other.held_mib != first.held_mib
    assert [program.name for program in apart.programs] == ["cats", "plain", "dogs"]
    assert [program.name for program in first.programs] == ["cats+dogs", "plain"]
