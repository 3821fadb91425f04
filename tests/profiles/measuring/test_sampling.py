from tenuto.profiles.measuring.sampling import next_batch


def order(wanted: list[int], latency_ms: dict[int, float], tolerance_pct: float) -> list[int]:
    made: list[int] = []
    known: dict[int, float] = {}
    while (size := next_batch(wanted, known, tolerance_pct)) is not None:
        made.append(size)
        known[size] = latency_ms[size]
    return made


SIZES = [1, 2, 4, 8, 16, 32, 64]


def test_without_a_tolerance_everything_is_measured_in_order() -> None:
    assert order(SIZES, dict.fromkeys(SIZES, 1.0), 0.0) == SIZES
    assert next_batch([], {}, 3.0) is None
    assert next_batch([1, 2], {1: 1.0, 2: 2.0}, 3.0) is None


def test_a_line_needs_three_points() -> None:
    assert order(SIZES, {b: 2.0 * b + 5 for b in SIZES}, 1.0) == [1, 64, 8]


def test_a_bend_is_looked_into_where_the_predictions_disagree() -> None:
    bent = {b: 5.0 + max(0.0, b - 16) for b in SIZES}  # flat to 16, then steep
    made = order(SIZES, bent, 3.0)
    assert made[:3] == [1, 64, 8]
    assert {16, 32} & set(made[3:5])
    assert sorted(order(SIZES, bent, 1e-6)) == SIZES


def test_sizes_beyond_the_measured_ones_come_before_those_between() -> None:
    assert next_batch([1, 2, 4, 8], {1: 1.0, 2: 2.0, 4: 4.0}, 3.0) == 8
    assert next_batch([1, 2, 4, 8], {2: 2.0, 4: 4.0, 8: 8.0}, 3.0) == 1
