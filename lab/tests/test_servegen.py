"""The clients of ServeGen as arrivals: their rates, their bursts and their lengths."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import make_schedule
from tenuto.placement import ModelSpec
from tenuto.placement.generation_capacity import with_lengths
from tenuto_lab.servegen import ServegenOptions, client_arrivals, client_tokens, published


def writes(**options: object) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "w",
            "rate_rps": 5,
            "slo": {"ttft_ms": 100, "tpot_ms": 10},
            "generates": {},
            "arrival": {"process": "servegen", "options": options},
        }
    )


def drawn(seed: int, duration_s: float = 200.0, **options: object) -> tuple[np.ndarray, np.ndarray]:
    return client_arrivals(5.0, duration_s, ServegenOptions.model_validate(options), np.random.default_rng(seed))


def test_the_table_is_whole() -> None:
    found = published()
    assert {name: len(clients) for name, clients in found.items()} == {
        "m-small": 43,
        "m-mid": 108,
        "m-large": 162,
        "deepseek-r1": 73,
        "mm-image": 35,
    }
    assert all(len(client.hours) == 24 for clients in found.values() for client in clients)
    assert found["m-mid"][0].cv == 10.94


@pytest.mark.parametrize("options", [{"category": "m-small"}, {"category": "m-mid", "client": 3}])
def test_all_clients_together_have_the_rate(options: dict[str, object]) -> None:
    counts = [len(drawn(seed, **options)[0]) for seed in range(300)]
    # By its standard error; bursty clients, which begin with no more arrivals than later on, too.
    assert np.mean(counts) == pytest.approx(1000.0, abs=4.0 * np.std(counts) / 300**0.5)
    first = [np.sum(drawn(seed, 20.0, **options)[0] < 2.0) for seed in range(300)]
    assert np.mean(first) == pytest.approx(10.0, abs=4.0 * np.std(first) / 300**0.5)


def test_gaps_have_the_clients_variation() -> None:
    times, _ = drawn(1, 20_000.0, category="m-mid", client=3)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(published()["m-mid"][2].cv, rel=0.1)


def test_rates_follow_the_day() -> None:
    client = published()["m-large"][1]
    times, _ = drawn(2, 7200.0, category="m-large", client=2, start_hour=9.5)
    counts = np.histogram(times, [0.0, 1800.0, 5400.0, 7200.0])[0]
    expected = np.array([client.hours[hour] * span for hour, span in ((9, 1800), (10, 3600), (11, 1800))]) * 5.0
    assert counts == pytest.approx(expected, rel=0.05)


def test_each_client_has_its_lengths() -> None:
    options = ServegenOptions(category="m-small")
    lengths = [client.prompt_tokens for client in options.clients]
    place = next(place for place, each in enumerate(lengths) if each is not None)
    chosen = lengths[place]
    assert chosen is not None
    found = client_tokens("prompt_tokens", options, np.full(5000, place), np.random.default_rng(0))
    assert found is not None
    assert found.max() <= chosen.most
    assert np.median(found) == pytest.approx((chosen.quantiles or {})[50], rel=0.05, abs=1)
    unknown = next(place for place, each in enumerate(lengths) if each is None)
    found = client_tokens("prompt_tokens", options, np.full(100, unknown), np.random.default_rng(0))
    assert found is not None  # those of others
    assert found.min() >= 1
    images = ServegenOptions(category="mm-image")
    assert client_tokens("prompt_tokens", images, np.zeros(3, np.int64), np.random.default_rng(0)) is None


def test_a_schedule_is_the_same_for_a_seed_and_has_lengths() -> None:
    one, two, other = (make_schedule([writes(category="deepseek-r1")], 60.0, seed) for seed in (3, 3, 4))
    assert one.hash == two.hash != other.hash
    assert one.tokens is not None
    assert len(one.tokens.output) == len(one)
    assert np.median(one.tokens.output) > 500  # it reasons
    planned = with_lengths(writes(category="deepseek-r1")).generates
    assert planned is not None
    assert planned.output_tokens is not None
    assert planned.output_tokens.mean > 500


@pytest.mark.parametrize("category", ["m-small", "m-mid", "m-large", "deepseek-r1"])
def test_lengths_are_planned_with_the_mean_that_comes(category: str) -> None:
    spec = writes(category=category)
    planned, tokens = with_lengths(spec).generates, make_schedule([spec], 20_000.0, 1).tokens
    assert planned is not None
    assert tokens is not None
    for lengths, come in ((planned.prompt_tokens, tokens.prompt), (planned.output_tokens, tokens.output)):
        assert lengths is not None
        assert lengths.mean == pytest.approx(come.mean(), rel=0.15)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "category"),
        ({"category": "none"}, "category"),
        ({"category": "m-small", "client": 44}, "43 clients"),
        ({"category": "mm-image"}, "prompt_tokens"),
        ({"category": "m-small", "start_hour": 24}, "start_hour"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make_schedule([writes(**options)], 10.0, 0)
