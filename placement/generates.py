"""What a workload says of a model that generates: lengths of prompts and outputs, the engine's limits, and the SLO."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_serializer, model_validator

from tenuto.documents import Fault, StrictModel, parse_document
from tenuto.errors import refused
from tenuto.files import csv_rows

MOST_TOKENS = 100_000_000  # limit: tokens of a text; no model reads a hundredth of it
Tokens = Annotated[float, Field(ge=1, le=MOST_TOKENS)]
_CURE = (
    "Give a number of tokens, {lognormal: {median: 300, sigma: 1}}, {quantiles: {0: 10, 50: 300, 100: 4000}} or "
    "{trace: FILE, column: NAME}."
)


def tokens_of(cell: str) -> int | None:
    """Return the number of tokens in a cell of a CSV; None if it has none."""
    digits = cell.strip()
    is_number = digits.isdecimal() and len(digits) <= len(str(MOST_TOKENS)) and 1 <= int(digits) <= MOST_TOKENS
    return int(digits) if is_number else None


class LogNormal(StrictModel):
    """Lengths whose logarithm is normal: `sigma` is its standard deviation. `most` cuts longer ones."""

    median: Tokens
    sigma: Annotated[float, Field(ge=0, le=5)]
    most: Tokens | None = None

    @property
    def mean(self) -> float:
        """The mean length: of a normal logarithm, and of one that is cut (its limited expected value)."""
        mu, sigma = math.log(self.median), self.sigma
        whole = math.exp(mu + sigma * sigma / 2.0)
        if self.most is None or not sigma:
            return max(1.0, whole if self.most is None else min(self.median, self.most))
        cut = (math.log(self.most) - mu) / sigma
        return max(1.0, whole * _normal(cut - sigma) + self.most * (1.0 - _normal(cut)))


def _normal(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2.0))


class _Column(StrictModel):
    """A column of a CSV; of the rows of one model, where the file has several."""

    trace: str
    column: str
    model: str | None = None

    def read(self) -> NDArray[np.int64]:
        """Return its numbers of tokens.

        Raises:
            InvalidInputError: the file cannot be read, lacks the column or rows of the model, or has no such number.
        """
        needed = (self.column,) if self.model is None else (self.column, "model")
        read: dict[str, list[int]] = {}
        with csv_rows(self.trace, needed, "Name a column of the file's first line.") as (columns, rows):
            at, model_at = columns[self.column], columns.get("model")
            for line, row in rows:
                if (tokens := tokens_of(row[at])) is None:
                    rule = f"{self.column} is no whole number from 1 to {MOST_TOKENS}"
                    raise refused(f"{self.trace}: line {line}", row[at], rule, "Correct it, or name another column.")
                read.setdefault("" if model_at is None else row[model_at], []).append(tokens)
        if self.model is None and len(read) > 1:
            cure = f"Add model: NAME, such as {next(iter(read))}."
            raise refused(self.trace, None, f"has rows of {len(read)} models", cure)
        mine = read.get(self.model, []) if self.model is not None else next(iter(read.values()), [])
        if not mine:
            raise refused(self.trace, self.model, "has no such rows", "Correct `model`, or give another file.")
        return np.array(mine)


def quantiles_of(tokens: NDArray[np.int64]) -> dict[float, float]:
    """Return the quantiles of these lengths, as `Lengths` has them: every percent, and closer where the longest are."""
    # derived: closer for the last percent, as a few texts may have most tokens
    percents = [*map(float, range(100)), 99.3, 99.5, 99.7, 99.8, 99.9, 99.93, 99.95, 99.97, 99.98, 99.99, 100.0]
    return dict(zip(percents, np.percentile(tokens, percents).tolist(), strict=True))


class Lengths(StrictModel):
    """How many tokens prompts or outputs have, or how large another size of requests is. In a file it is a number, or
    one of the keys below.

    `quantiles` are tokens by percent, from 0 to 100; between them lengths are spread evenly. Of `trace`, a CSV with the
    `column`, the quantiles are taken when it is read: nothing else needs the file.
    """

    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    lognormal: LogNormal | None = None
    quantiles: dict[Annotated[float, Field(ge=0, le=100)], Tokens] | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if isinstance(value, bool | str | list) or value is None:
            raise Fault("is no length", _CURE)
        if isinstance(value, dict) and value.keys() & {"trace", "column"}:
            return {"quantiles": quantiles_of(parse_document(_Column, value).read())}
        return value if isinstance(value, dict | Lengths) else {"tokens": value}

    @model_validator(mode="after")
    def _one_form(self) -> Lengths:
        if sum(form is not None for form in (self.tokens, self.lognormal, self.quantiles)) != 1:
            raise Fault("needs exactly one form of length", _CURE)
        if self.quantiles is not None:
            rows = sorted(self.quantiles.items())
            if [percent for percent, _ in rows[:1] + rows[-1:]] != [0, 100] or any(
                b < a for (_, a), (_, b) in pairwise(rows)
            ):
                raise Fault("quantiles must go from 0 to 100 percent and never fall", _CURE)
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: Any) -> Any:
        return self.tokens if self.tokens is not None else handler(self)

    @property
    def mean(self) -> float:
        """The mean number of tokens."""
        if self.lognormal is not None:
            return self.lognormal.mean
        if self.quantiles is not None:
            rows = sorted(self.quantiles.items())
            # Unit: percent, and the mean of two.
            return sum((q - p) * (a + b) / 200.0 for (p, a), (q, b) in pairwise(rows))
        return float(self.tokens or 1)

    @property
    def most(self) -> float:
        """The most tokens there are; infinite for a normal logarithm that is not cut."""
        if self.lognormal is not None:
            return self.lognormal.most or math.inf
        return float(max((self.quantiles or {0: self.tokens or 1}).values()))

    def quantile(self, part: float) -> float:
        """Return the length that this part of the lengths does not exceed, from 0 to 1; infinite for the longest of a
        normal logarithm that is not cut."""
        if self.lognormal is not None:
            form = self.lognormal
            longest = form.most or math.inf
            if part >= 1.0:
                return longest
            return min(longest, form.median * math.exp(form.sigma * NormalDist().inv_cdf(part)))
        percents, tokens = zip(*sorted((self.quantiles or {0: self.tokens or 1}).items()), strict=True)
        return float(np.interp(100.0 * part, percents, tokens))  # unit: percent

    def part_up_to(self, tokens: int) -> float:
        """Return the part of the drawn lengths that are at most so many tokens."""
        limit = tokens + 0.5  # derived: drawn lengths are rounded
        if limit >= self.most:
            return 1.0
        if self.lognormal is not None:
            apart = math.log(limit / self.lognormal.median)
            sigma = self.lognormal.sigma
            return _normal(apart / sigma) if sigma else float(apart >= 0)
        part = 0.0
        for (low, a), (high, b) in pairwise(sorted((self.quantiles or {}).items())):
            if limit > a:
                part += (high - low) / 100.0 * (1.0 if b <= limit else (limit - a) / (b - a))  # unit: percent
        return part

    def scaled(self, factor: float) -> Lengths:
        """Return lengths so many times as long, at least 1 token each."""

        def longer(tokens: float) -> float:
            return max(1.0, tokens * factor)

        if self.lognormal is not None:
            form = self.lognormal
            most = None if form.most is None else longer(form.most)
            return Lengths(lognormal=LogNormal(median=longer(form.median), sigma=form.sigma, most=most))
        if self.quantiles is not None:
            return Lengths(quantiles={percent: longer(tokens) for percent, tokens in self.quantiles.items()})
        return Lengths(tokens=round(longer(float(self.tokens or 1))))

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return so many lengths, at least 1 token each."""
        if self.lognormal is not None:
            form = self.lognormal
            drawn = form.median * np.exp(form.sigma * generator.standard_normal(count))
            drawn = np.minimum(drawn, form.most or math.inf)
        elif self.quantiles is not None:
            rows = sorted(self.quantiles.items())
            drawn = np.interp(100.0 * generator.random(count), [p for p, _ in rows], [n for _, n in rows])
        else:
            drawn = np.full(count, float(self.tokens or 1))
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


class Generates(StrictModel):
    """A model that generates: lengths, and the limits of the engine that runs it.

    Lengths that are not given come from the columns of a trace. A step decodes at most `max_sequences` sequences, and
    has at most `max_batch_tokens` tokens.
    """

    prompt_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    max_sequences: Annotated[int, Field(ge=1)] = 256
    max_batch_tokens: Annotated[int, Field(ge=1)] = 2048

    @model_validator(mode="after")
    def _a_step_holds_all(self) -> Generates:
        if self.max_batch_tokens < self.max_sequences:
            raise Fault(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_sequences ({self.max_sequences}), so that a "
                "step cannot decode all sequences",
                "Raise max_batch_tokens or lower max_sequences.",
            )
        return self


class GenerationParameters(StrictModel):
    """How the text of a stage goes on, where its function says nothing else; as in the generate extension."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None


class TokenSlo(StrictModel):
    """The SLO of a model that generates: `ttft_ms` from arrival to the first token, and `tpot_ms` for each further
    token, in the mean of a request. A request is in time when it keeps both."""

    ttft_ms: Annotated[float, Field(gt=0)]
    tpot_ms: Annotated[float, Field(gt=0)]

    def answer_ms(self, output_tokens: float) -> float:
        """Return the latest time from arrival to the last of so many tokens."""
        return self.ttft_ms + self.tpot_ms * max(0.0, output_tokens - 1.0)

    def is_met_by(self, first_ms: float, writing_ms: float, output_tokens: float, tolerance_ms: float = 0.0) -> bool:
        """Return whether an answer of so many tokens keeps both: its first token came `first_ms` after its arrival, and
        the last one `writing_ms` after that."""
        further_ms = writing_ms / (output_tokens - 1.0) if output_tokens > 1.0 else 0.0
        return first_ms <= self.ttft_ms + tolerance_ms and further_ms <= self.tpot_ms + tolerance_ms

    def within(self, time_ms: float, output_tokens: float) -> TokenSlo:
        """Return the bounds for an answer of so many tokens of which the last one is due in this time, which is above
        0. A further token never has more time than here; what is left is for the first one."""
        further = max(0.0, output_tokens - 1.0)
        tpot_ms = self.tpot_ms * min(1.0, time_ms / self.answer_ms(output_tokens))
        return TokenSlo(ttft_ms=time_ms - tpot_ms * further, tpot_ms=tpot_ms)

    def scaled(self, factor: float) -> TokenSlo:
        """Return both bounds multiplied by `factor`."""
        return TokenSlo(ttft_ms=self.ttft_ms * factor, tpot_ms=self.tpot_ms * factor)
