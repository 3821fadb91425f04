"""Estimates how long the prompts and outputs of models that generate are.

Lengths are as declared, or as the declared arrivals have them, until measured ones differ by more than chance. The mean
follows with the time constant of the rates; when the last fifth of it can hardly have come from that mean, it starts
anew from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tenuto.deployments.control.interface import ModelSeen
from tenuto.errors import InvalidInputError
from tenuto.placement.generates import Generates, Lengths
from tenuto.placement.generation_capacity import RATE_STEP, with_lengths
from tenuto.placement.planner.task import CHANCE
from tenuto.placement.workload import ModelSpec

_RECENT = 0.2  # fitted: the part of the time constant after which a change is told from chance


@dataclass
class _Mean:
    """A fading mean of lengths: weights of looks and of lengths, and sums of the lengths and of their looks' means
    squared, by these weights."""

    looks: float = 0.0
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, kept: float, count: int, mean: float) -> None:
        """Fade what is there to the part `kept`, and add a look with so many lengths of this mean."""
        self.looks = self.looks * kept + 1.0
        self.count = self.count * kept + count
        self.total = self.total * kept + count * mean
        self.squares = self.squares * kept + count * mean * mean

    @property
    def mean(self) -> float:
        """The mean length; NaN before there is any."""
        return self.total / self.count if self.count else math.nan

    def differs(self, other: float) -> bool:
        """Whether the lengths can hardly have this mean, as the looks' means vary."""
        if self.looks < CHANCE:
            return False
        variance = max(0.0, self.squares / self.count - self.mean**2)
        return abs(self.mean - other) > CHANCE * math.sqrt(variance / self.looks) + 1e-6 * other


@dataclass
class _Followed:
    long: _Mean = field(default_factory=_Mean)
    recent: _Mean = field(default_factory=_Mean)

    def add(self, seconds: float, average_s: float, count: int, mean: float) -> None:
        self.long.add(math.exp(-seconds / average_s), count, mean)
        self.recent.add(math.exp(-seconds / average_s / _RECENT), count, mean)
        if self.recent.differs(self.long.mean):
            self.long = replace(self.recent)


class MeasuredLengths:
    """The lengths of all models, by name."""

    def __init__(self, average_s: float) -> None:
        """Begin with nothing measured; `average_s` is the time constant."""
        self._average_s = average_s
        self._followed: dict[str, tuple[_Followed, _Followed]] = {}
        self._asked: dict[str, dict[str, float]] = {}  # factors on declared lengths that were planned with
        self._declared: dict[str, tuple[ModelSpec, ModelSpec]] = {}  # by model: as it was given, and with its lengths

    def observe(self, seconds: float, seen: Mapping[str, ModelSeen]) -> None:
        """Add the lengths of the requests that were answered in a look of so many seconds."""
        for name, model in seen.items():
            if model.generated:
                means = model.prompt_tokens / model.generated, model.output_tokens / model.generated
                followed = self._followed.setdefault(name, (_Followed(), _Followed()))
                for each, mean in zip(followed, means, strict=True):
                    each.add(seconds, self._average_s, model.generated, mean)

    def _known(self, spec: ModelSpec) -> Iterator[tuple[str, _Mean, Lengths]]:
        """Yield the declared lengths of a model that has been measured, by their key, with the measured mean."""
        followed, generates = self._followed.get(spec.name), self._with_lengths(spec).generates
        if followed is not None and generates is not None:
            declared_lengths = {"prompt_tokens": generates.prompt_tokens, "output_tokens": generates.output_tokens}
            for each, (key, declared) in zip(followed, declared_lengths.items(), strict=True):
                if declared is not None:
                    yield key, each.long, declared

    def _factors(self, spec: ModelSpec) -> dict[str, float]:
        """Return the factors on declared lengths by their key, without those that may be right. Answers may all be
        empty: a mean below one token counts as one."""
        known = self._known(spec)
        return {
            key: max(1.0, long.mean) / declared.mean for key, long, declared in known if long.differs(declared.mean)
        }

    def measured(self, specs: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
        """Return the models with lengths as measured."""
        return tuple(self._measured(spec) for spec in specs)

    def _measured(self, spec: ModelSpec) -> ModelSpec:
        factors, spec = self._factors(spec), self._with_lengths(spec)
        if spec.generates is None or not factors:
            return spec
        known = ((key, declared) for key, _, declared in self._known(spec) if key in factors)
        update = {key: declared.scaled(_stepped(factors[key])) for key, declared in known}
        return spec.model_copy(update={"generates": spec.generates.model_copy(update=update)})

    def _with_lengths(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with the lengths of its arrivals, where it leaves them to these and they can be read here.
        Without any, nothing would speak against a plan with too few gpu-lets."""
        if spec.generates is None or None not in (spec.generates.prompt_tokens, spec.generates.output_tokens):
            return spec
        given, known = self._declared.get(spec.name, (None, spec))
        if given is None or (given.generates, given.arrival) != (spec.generates, spec.arrival):
            try:
                known = with_lengths(spec)
            except InvalidInputError:
                known = spec
            self._declared[spec.name] = spec, known
        return spec.model_copy(update={"generates": known.generates})

    def asked(self, specs: Iterable[ModelSpec]) -> None:
        """Note that these models are planned with their present lengths."""
        self._asked = {spec.name: self._factors(spec) for spec in specs}

    def have_moved(self, specs: Iterable[ModelSpec]) -> bool:
        """Whether lengths differ by more than chance from those planned with last."""
        return any(
            long.differs(declared.mean * self._asked.get(spec.name, {}).get(key, 1.0))
            for spec in specs
            for key, long, declared in self._known(spec)
        )


def _stepped(factor: float) -> float:
    """Return the nearest of some factors. Each is another question to the trials of a policy, which take minutes for
    all shares of all GPU types, and know an answer again."""
    return RATE_STEP ** round(math.log(factor) / math.log(RATE_STEP))


def as_declared(specs: Iterable[ModelSpec], declared: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
    """Return planned models with the lengths that are declared."""
    generates: dict[str, Generates | None] = {spec.name: spec.generates for spec in declared}
    return tuple(
        spec.model_copy(update={"generates": generates[spec.name]}) if generates.get(spec.name) else spec
        for spec in specs
    )
