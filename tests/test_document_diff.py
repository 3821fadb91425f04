"""Two documents that differ are shown by what differs."""

from tests.instruments.document_diff import explain_difference
from tests.instruments.plans import make_plan


def test_plans_that_differ_are_shown_by_the_lines_that_differ() -> None:
    left, right = (make_plan({"n0/0/a": (share, ["a"])}, slo_ms=slo_ms) for share, slo_ms in ((50.0, 9.0), (50.0, 8.0)))
    lines = explain_difference(left, right) or []
    assert [line.strip("+- ") for line in lines if line.startswith(("-  ", "+  "))] == ["slo_ms: 9.0", "slo_ms: 8.0"]
    assert max(map(len, lines)) < 120
    assert explain_difference(left, left.model_dump()) is None
    assert explain_difference(1, 2) is None


def test_a_long_difference_is_cut() -> None:
    left, right = (make_plan({f"n0/{gpu}/{name}": (50.0, ["a"]) for gpu in range(30)}) for name in "ab")
    lines = explain_difference(left, right) or []
    assert lines[-1].startswith("… and ")
    assert len(lines) <= 102
