"""Arrivals and lengths of clients of production model services, as ServeGen published them: each client has its rate,
its burstiness and its lengths."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tenuto.documents import Fault, StrictModel
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.arrivals.arrival_processes import ArrivalProcess, Tokens
from tenuto.placement.generates import Lengths

Times = NDArray[np.float64]
Rows = NDArray[np.int64]
_FILE = Path(__file__).parent / "data" / "servegen.csv"
_HOUR_S = 3600.0  # unit
_SAMPLE = 20_000  # limit: lengths that stand for all of a category; their median is known to about 2 %


@dataclass(frozen=True)
class PublishedClient:
    """One client. `hours` are rates relative to the mean, by hour of the day."""

    mean_rps: float
    cv: float
    hours: tuple[float, ...]
    prompt_tokens: Lengths | None
    output_tokens: Lengths | None


@lru_cache(maxsize=1)
def published() -> dict[str, tuple[PublishedClient, ...]]:
    """Return the clients by category, those with the highest rates first."""
    found: dict[str, list[PublishedClient]] = {}
    with _FILE.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(line for line in stream if not line.startswith("#")):
            lengths = [_lengths(row[key]) for key in ("prompt_tokens", "output_tokens")]
            hours = tuple(float(part) for part in row["hours"].split())
            client = PublishedClient(float(row["mean_rps"]), float(row["cv"]), hours, *lengths)
            found.setdefault(row["category"], []).append(client)
    return {category: tuple(clients) for category, clients in found.items()}


def _lengths(text: str) -> Lengths | None:
    """Return lengths of four percentiles. What lies beyond the outer ones is not published, and counts as these."""
    if not text:
        return None
    p10, p50, p90, p99 = (max(1.0, float(part)) for part in text.split())
    return Lengths(quantiles={0: p10, 10: p10, 50: p50, 90: p90, 99: p99, 100: p99})


class ServegenOptions(StrictModel):
    """All clients of a `category`, or one `client` of it, of which 1 has the highest rate.

    `start_hour`: the hour of the day at which the run begins, from which on rates follow the day; without it they are
    even.
    """

    category: Literal["m-small", "m-mid", "m-large", "deepseek-r1", "mm-image"]
    client: Annotated[int, Field(ge=1, strict=True)] | None = None
    start_hour: Annotated[float, Field(ge=0, lt=24)] | None = None

    @model_validator(mode="after")
    def _is_there(self) -> ServegenOptions:
        known = len(published()[self.category])
        if self.client is not None and self.client > known:
            raise Fault(f"{self.category} has {known} clients", f"Give client: 1 to {known}, or none.")
        return self

    @property
    def clients(self) -> tuple[PublishedClient, ...]:
        """The clients that ask."""
        of_category = published()[self.category]
        return of_category if self.client is None else (of_category[self.client - 1],)


def client_arrivals(
    rate_rps: float, duration_s: float, options: ServegenOptions, generator: np.random.Generator
) -> tuple[Times, Rows]:
    """Return arrival times in s and the place of each one's client. All clients together have the mean rate, with their
    published parts of it, and each has gamma gaps of its own variation."""
    whole_rps = sum(client.mean_rps for client in options.clients)
    parts = [
        _bursty(client, rate_rps * client.mean_rps / whole_rps, duration_s, options.start_hour, generator)
        for client in options.clients
    ]
    times = np.concatenate(parts)
    order = np.argsort(times, kind="stable")
    return times[order], np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]


def _bursty(
    client: PublishedClient,
    rate_rps: float,
    duration_s: float,
    start_hour: float | None,
    generator: np.random.Generator,
) -> Times:
    """Return the arrivals of one client: a renewal process in a time in which one request is expected per unit."""
    at_s, expected = _expected(client, rate_rps, duration_s, start_hour)
    shape = client.cv**-2
    spread = max(1.0, client.cv) * expected[-1] ** 0.5
    chunk = int(expected[-1] + 6.0 * spread + 16.0)
    # The process has been running before: what is left of the gap in which the run begins is a uniform part of a gap
    # that is drawn in proportion to its length (renewal theory). Else bursty clients would all begin with a burst.
    first = generator.random() * generator.gamma(shape + 1.0, 1.0 / shape)
    found = first + np.concatenate(([0.0], np.cumsum(generator.gamma(shape, 1.0 / shape, chunk))))
    while found[-1] < expected[-1]:
        found = np.concatenate((found, found[-1] + np.cumsum(generator.gamma(shape, 1.0 / shape, chunk))))
    times: Times = np.interp(found[found < expected[-1]], expected, at_s)
    return times


def _expected(
    client: PublishedClient, rate_rps: float, duration_s: float, start_hour: float | None
) -> tuple[Times, Times]:
    """Return moments in s, and how many requests are expected until each."""
    if start_hour is None:
        return np.array([0.0, duration_s]), np.array([0.0, rate_rps * duration_s])
    begin_s = start_hour * _HOUR_S
    turns = np.arange(np.floor(start_hour) + 1.0, (begin_s + duration_s) / _HOUR_S) * _HOUR_S - begin_s
    at_s = np.concatenate(([0.0], turns, [duration_s]))
    hours = np.floor((begin_s + (at_s[:-1] + at_s[1:]) / 2.0) / _HOUR_S).astype(int) % 24
    rates = rate_rps * np.array(client.hours)[hours]
    return at_s, np.concatenate(([0.0], np.cumsum(rates * np.diff(at_s))))


def client_tokens(
    key: Literal["prompt_tokens", "output_tokens"],
    options: ServegenOptions,
    places: Rows,
    generator: np.random.Generator,
) -> Rows | None:
    """Return lengths for requests of these clients; None if none of them has any.

    A client without published lengths has those of other clients of its category, drawn by their rates.
    """
    pool = [client for client in published()[options.category] if getattr(client, key) is not None]
    if not pool:
        return None
    rates = np.array([client.mean_rps for client in pool])
    found = np.empty(len(places), dtype=np.int64)
    for place, client in enumerate(options.clients):
        mine = np.flatnonzero(places == place)
        lengths = getattr(client, key)
        if lengths is not None:
            found[mine] = lengths.draw(len(mine), generator)
            continue
        drawn = generator.choice(len(pool), len(mine), p=rates / rates.sum())
        for which in np.unique(drawn):
            rows = mine[drawn == which]
            found[rows] = getattr(pool[which], key).draw(len(rows), generator)
    return found


def usual_tokens(key: Literal["prompt_tokens", "output_tokens"], options: ServegenOptions) -> Rows | None:
    """Return lengths that stand for those of many requests, always the same; None if none is known."""
    generator = np.random.default_rng(0)
    rates = np.array([client.mean_rps for client in options.clients])
    places = generator.choice(len(rates), _SAMPLE, p=rates / rates.sum())
    return client_tokens(key, options, places, generator)


def _times(
    _model: str,
    rate_rps: float,
    duration_s: float,
    _arrival: Arrival,
    options: ServegenOptions,
    generator: np.random.Generator,
) -> Times:
    return client_arrivals(rate_rps, duration_s, options, generator)[0]


def _tokens(
    _model: str,
    rate_rps: float,
    duration_s: float,
    _arrival: Arrival,
    options: ServegenOptions,
    generator: np.random.Generator,
    of_lengths: np.random.Generator,
) -> Tokens:
    _, places = client_arrivals(rate_rps, duration_s, options, generator)
    return (
        client_tokens("prompt_tokens", options, places, of_lengths),
        client_tokens("output_tokens", options, places, of_lengths),
    )


def _usual_tokens(_model: str, _arrival: Arrival, options: ServegenOptions) -> Tokens:
    return usual_tokens("prompt_tokens", options), usual_tokens("output_tokens", options)


SERVEGEN = ArrivalProcess(ServegenOptions, _times, tokens=_tokens, usual_tokens=_usual_tokens)
