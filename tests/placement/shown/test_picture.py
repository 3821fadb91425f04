"""The picture of a plan: well-formed, complete and labelled, for one GPU and for many."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tenuto.placement import Plan, load_policy
from tenuto.placement.shown.picture import MOST_SINGLE_BARS, PALETTE, draw
from tenuto_lab.baselines.usher.usher import WaoUsher
from tests.placement.published import LANGUAGE_MIX, equal_rates, planned, v100s

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("gpus", [1, 2, 17, 64])
def test_every_gpu_has_its_own_bar(gpus: int) -> None:
    plan = planned(WaoUsher(), equal_rates(["resnet50", "mobilenet_v2"], 300, 200), v100s(gpus))
    shown = texts(draw(plan))
    for gpu in plan.gpus:
        assert gpu.id in shown
    assert shown.count("idle") == gpus - plan.expected.gpus_used


def test_hundreds_of_gpus_share_bars_with_their_likes() -> None:
    plan = planned(WaoUsher(), equal_rates(LANGUAGE_MIX, 30_000, 300), v100s(500))
    shown = texts(draw(plan))
    counts = [int(match.group(1)) for text in shown if (match := re.fullmatch(r"(\d+) GPUs", text))]
    assert sum(counts) == 500
    assert len(counts) < MOST_SINGLE_BARS


def test_every_replica_has_a_tooltip_with_the_facts() -> None:
    plan = planned(WaoUsher(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(3))
    root = ElementTree.fromstring(draw(plan))
    tips = ["".join(t.itertext()) for g in root.iter(f"{SVG}g") for t in g.iter(f"{SVG}title")]
    assert len(tips) == sum(len(g.models) for g in plan.gpulets)
    assert all("batch" in tip and "ms of 300 ms SLO" in tip and "rps" in tip for tip in tips)


def test_turns_and_unserved_models_are_explained() -> None:
    plan = planned(load_policy("ffd"), equal_rates([*LANGUAGE_MIX, "xlnet"], 50, 200), v100s(2))
    shown = texts(draw(plan))
    assert any(text.startswith("unserved: xlnet") for text in shown)
    assert "dashed frame: unrestricted gpu-let; models in one frame take turns" in shown


def percent(node: ElementTree.Element, name: str) -> float:
    return float(node.get(name, "0%").removesuffix("%"))


def test_parts_stay_inside_the_picture_and_bars_follow_shares() -> None:
    plan = planned(WaoUsher(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(3))
    root = ElementTree.fromstring(draw(plan))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    bars = [node for node in root.iter(f"{SVG}svg") if node.get("class") == "bar"]
    for bar in bars:
        assert float(bar.get("x", 0)) + float(bar.get("width", 0)) <= width
        assert float(bar.get("y", 0)) + float(bar.get("height", 0)) <= height
    shown = [node for bar in bars for node in bar.iter(f"{SVG}svg") if node.get("class") == "gpulet"]
    for node, gpulet in zip(shown, plan.gpulets, strict=True):
        assert percent(node, "width") == pytest.approx(gpulet.share_pct or 100, abs=1e-3)
        assert percent(node, "x") + percent(node, "width") <= 100.01
        assert sum(percent(one, "width") for one in node.findall(f"{SVG}svg")) == pytest.approx(100)


def test_an_empty_plan_and_strange_names_are_drawn() -> None:
    assert ElementTree.fromstring(draw(Plan.from_data({"policy": {"name": "a<b&c"}}))) is not None
    assert len(set(PALETTE)) == len(PALETTE)


def test_the_picture_is_the_same_every_time() -> None:
    plan = planned(WaoUsher(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(3))
    assert draw(plan) == draw(plan)


def test_a_long_reason_is_wrapped_not_cut() -> None:
    reason = " ".join(f"word{index}" for index in range(60))
    plan = Plan.from_data(
        {
            "policy": {"name": "p"},
            "unserved": ["m"],
            "unserved_reasons": {"m": reason},
            "models": [{"name": "m", "rate_rps": 1, "slo_ms": 9}],
        }
    )
    text = draw(plan)
    assert all(word in text for word in reason.split())
