"""What a profile says of batches whose requests vary in size."""

import numpy as np
import pytest

from tenuto.errors import MissingProfileError
from tenuto.profiles import ModelProfile
from tenuto.profiles.size_classes import class_of, find_classes, in_order

TOKENS = (16, 64, 256)


def measured(*, batches: dict[int, tuple[int, ...]] | None = None) -> ModelProfile:
    batches = batches or dict.fromkeys(TOKENS, (1, 4, 8))
    points = [
        {"batch_size": b, "sizes": {"tokens": n}, "latency_ms": 1 + 0.01 * n * b, "memory_mib": 100 + n * b}
        for n, sizes in batches.items()
        for b in sizes
    ]
    return ModelProfile.model_validate({"points": points})


def test_a_batch_costs_what_the_smallest_measured_sizes_that_cover_it_cost() -> None:
    profile = measured()
    assert profile.size_names == ("tokens",)
    assert profile.size_classes == ((16,), (64,), (256,))
    for tokens, padded in ((1, 16), (16, 16), (17, 64), (256, 256)):
        assert profile.padded_to({"tokens": tokens}).latency_ms(4) == pytest.approx(1 + 0.04 * padded)
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
    mean = profile.mean_over((0.5, 0.25, 0.25))
    assert mean.size_names == ()
    assert mean.batch_sizes() == (1, 4)
    assert mean.latency_ms(4) == pytest.approx(1 + 0.04 * (0.5 * 16 + 0.25 * 64 + 0.25 * 256))
    assert mean.memory_mib(4) == 100 + 4 * 256
    assert profile.mean_over((0.5, 0.25, 0.25)) is mean
    # A class without requests does not count, and parts count among those that can be served.
    assert profile.mean_over((0.9, 0.0, 0.0)).latency_ms(8) == pytest.approx(1 + 0.08 * 16)


def test_the_class_of_several_sizes_is_the_smallest_that_covers_all() -> None:
    classes = in_order([(64, 64), (16, 16), (16, 256), (256, 256), (16, 16)])
    assert classes == ((16, 16), (16, 256), (64, 64), (256, 256))
    assert [class_of(classes, sizes) for sizes in ((3, 3), (3, 17), (17, 3), (65, 1), (300, 1))] == [0, 1, 2, 3, None]
    generator = np.random.default_rng(1)
    drawn = generator.integers(1, 300, (200, 2))
    assert find_classes(classes, drawn).tolist() == [
        -1 if (place := class_of(classes, (int(a), int(b)))) is None else place for a, b in drawn
    ]
