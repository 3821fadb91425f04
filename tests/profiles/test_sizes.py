"""What a profile says of batches whose requests vary in size."""

from itertools import pairwise, product

import numpy as np
import pytest

from tenuto.errors import MissingProfileError
from tenuto.profiles import ModelProfile
from tenuto.profiles.profile import SizeFit
from tenuto.profiles.size_classes import CLOSE, MOST_CLASSES, class_of, classes_by_cost, find_classes, in_order, united

TOKENS = (16, 64, 256)


def measured(*, batches: dict[int, tuple[int, ...]] | None = None) -> ModelProfile:
    batches = batches or dict.fromkeys(TOKENS, (1, 4, 8))
    points = [
        {"batch_size": b, "sizes": {"tokens": n}, "latency_ms": 1 + 0.01 * n * b, "memory_mib": 100 + n * b}
        for n, sizes in batches.items()
        for b in sizes
    ]
    return ModelProfile.model_validate({"points": points})


def test_a_batch_costs_what_the_smallest_class_that_covers_it_costs() -> None:
    profile = measured()
    assert profile.size_names == ("tokens",)
    assert profile.measured_sizes == ((16,), (64,), (256,))
    for (smaller,), (tokens,) in pairwise(profile.size_classes):
        assert profile.padded_to({"tokens": smaller + 1}) is profile.by_class[(tokens,)]
        assert profile.padded_to({"tokens": tokens}).latency_ms(4) == pytest.approx(1 + 0.04 * tokens)
    assert profile.padded_to({"tokens": 1}).latency_ms(4) == pytest.approx(1 + 0.04 * 16)
    assert profile.padded_to({"tokens": 64}).latency_ms(2) == pytest.approx(
        1 + 0.01 * 64 * 2
    )  # between batches: a line
    assert profile.padded_to({"tokens": 64}).memory_mib(5) == 100 + 64 * 8


def test_what_is_not_measured_is_refused_with_the_cure() -> None:
    profile = measured()
    with pytest.raises(MissingProfileError, match=r"no measured sizes cover tokens=300. .*--sizes tokens=300"):
        profile.padded_to({"tokens": 300})
    with pytest.raises(MissingProfileError, match="other sizes than height: tokens"):
        profile.padded_to({"height": 3})
    with pytest.raises(MissingProfileError, match=r"its latency is by tokens. Say which sizes come"):
        profile.latency_ms(1)
    with pytest.raises(MissingProfileError, match="other sizes than tokens: none"):
        ModelProfile.model_validate({"points": [{"batch_size": 1, "latency_ms": 1}]}).padded_to({"tokens": 1})


def test_points_of_a_model_name_the_same_sizes() -> None:
    points = [{"batch_size": 1, "latency_ms": 1, "sizes": sizes} for sizes in ({"tokens": 1}, {})]
    with pytest.raises(ValueError, match="its points have different sizes"):
        ModelProfile.model_validate({"points": points})


def test_the_mean_has_what_every_class_was_measured_at() -> None:
    profile = measured(batches={16: (1, 4, 8), 64: (1, 4), 256: (1, 4)})
    parts = {16: 0.5, 64: 0.25, 256: 0.25}
    mean = profile.mean_over(tuple(parts.get(tokens, 0.0) for (tokens,) in profile.size_classes))
    assert mean.size_names == ()
    assert mean.batch_sizes() == (1, 4)
    assert mean.latency_ms(4) == pytest.approx(1 + 0.04 * (0.5 * 16 + 0.25 * 64 + 0.25 * 256))
    assert mean.memory_mib(4) == 100 + 4 * 256
    assert profile.mean_over(tuple(parts.get(tokens, 0.0) for (tokens,) in profile.size_classes)) is mean
    # A class without requests does not count, and parts count among those that can be served.
    smallest = (0.9, *(0.0 for _ in profile.size_classes[1:]))
    assert profile.mean_over(smallest).latency_ms(8) == pytest.approx(1 + 0.08 * 16)


def test_size_classes_are_close_in_cost_and_few() -> None:
    cost = {(tokens,): 2.0 + 0.1 * tokens for tokens in TOKENS}
    classes = classes_by_cost(cost, [8])
    assert {*cost} < {*classes}
    assert all(tokens % 8 == 0 for (tokens,) in classes)
    assert all(2.0 + 0.1 * b <= CLOSE * (2.0 + 0.1 * (a + 8)) for (a,), (b,) in pairwise(classes))
    assert classes_by_cost({(tokens,): 5.0 + 0.001 * tokens for tokens in TOKENS}, [1]) == ((16,), (256,))
    assert classes_by_cost({(16,): 5.0, (64,): 4.0, (256,): 4.0}, [1]) == ((16,), (256,))  # a noisy measurement
    wide = {(h, w): float(h * w) for h in (32, 320) for w in (32, 320, 640)}
    assert 6 < len(classes_by_cost(wide, [32, 32])) <= MOST_CLASSES
    # Where a corner was not measured, nothing is added beside it; more measured sizes than the limit all stay.
    del wide[320, 640]
    assert not any(h > 32 and w > 320 for h, w in classes_by_cost(wide, [1, 1]))
    # Every measured size stays covered.
    corner = {(1, 1): 10.0, (1, 2): 10.1, (1, 3): 10.2, (2, 1): 10.1, (2, 2): 10.2, (3, 1): 10.2}
    assert all(class_of(classes_by_cost(corner, [1, 1]), sizes) is not None for sizes in corner)


def test_classes_of_several_gpu_types_are_few_and_cover_what_each_was_measured_for() -> None:
    dice = np.random.default_rng(3)
    for dimensions, each in ((1, 16), (2, 4), (3, 2)):
        grids = []
        for _ in range(4):
            axes = [sorted(dice.choice(np.arange(1, 400), each, replace=False)) for _ in range(dimensions)]
            grids.append(in_order(product(*([int(size) for size in axis] for axis in axes))))
        classes = united(grids)
        assert (len(classes), classes) == (MOST_CLASSES, in_order(classes))
        for grid in grids:
            assert [sizes for sizes in grid if class_of([c for c in grid if c in classes], sizes) is None] == []
    assert united([((16,), (64,)), ((16,), (256,)), ((16,), (64,))]) == ((16,), (64,), (256,))
    apart = [((n, 40 - n),) for n in range(1, 21)]  # none covers another: all stay
    assert len(united(apart)) == 20


def test_a_batch_between_four_measured_sizes_is_interpolated_between_them() -> None:
    def cost(h: int, w: int) -> float:
        return 1.0 + 0.01 * h + 0.02 * w + 0.001 * h * w

    points = [
        {"batch_size": 2, "sizes": {"height": h, "width": w}, "latency_ms": cost(h, w), "memory_mib": h * w}
        for h in (100, 300)
        for w in (100, 200)
    ]
    profile = ModelProfile.model_validate({"points": points, "multiples": {"height": 10}})
    between = [sizes for sizes in profile.size_classes if sizes not in profile.measured_sizes]
    assert len(between) > 3
    assert all(h % 10 == 0 for h, _ in between)
    for h, w in between:
        assert profile.by_class[h, w].latency_ms(2) == pytest.approx(cost(h, w))
    assert profile.by_class[between[-1]].memory_mib(2) == 300 * 200


def test_a_profile_says_how_far_a_size_that_was_left_out_is_off() -> None:
    assert measured().fit_sizes() == SizeFit(mean_error_pct=0.0, max_error_pct=0.0)
    points = [{"batch_size": 1, "sizes": {"n": n}, "latency_ms": 10.0 * n * n} for n in (1, 2, 3)]
    off = ModelProfile.model_validate({"points": points}).fit_sizes()  # 50 at 2 by its neighbours, measured 40
    assert off == SizeFit(mean_error_pct=25.0, max_error_pct=25.0)
    assert ModelProfile.model_validate({"points": points[:2]}).fit_sizes() is None


def test_the_class_of_several_sizes_is_the_smallest_that_covers_all() -> None:
    classes = in_order([(64, 64), (16, 16), (16, 256), (256, 256), (16, 16)])
    assert classes == ((16, 16), (16, 256), (64, 64), (256, 256))
    assert [class_of(classes, sizes) for sizes in ((3, 3), (3, 17), (17, 3), (65, 1), (300, 1))] == [0, 1, 2, 3, None]
    generator = np.random.default_rng(1)
    drawn = generator.integers(1, 300, (200, 2))
    assert find_classes(classes, drawn).tolist() == [
        -1 if (place := class_of(classes, (int(a), int(b)))) is None else place for a, b in drawn
    ]
