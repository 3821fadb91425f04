"""Profiles: what a model costs on a GPU type, by batch size and share, and how to look it up.

A profile never invents a number: between measured points it interpolates, outside them it raises
`MissingProfileError`. Measuring is `tenuto.profiles.measuring.measure`; the shipped files are in `profiles/data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from tenuto.documents import SCHEMA, Fault, SchemaVersion, StrictModel, dump_yaml
from tenuto.errors import MissingProfileError, one_of, refused
from tenuto.profiles.generation import Generation
from tenuto.profiles.gpu_types import measured_as
from tenuto.profiles.latency import LatencyTable, LinearLatency, between_shares
from tenuto.profiles.mig_instances import ALL_GPCS, InstanceType, instance_type_of
from tenuto.profiles.size_classes import Sizes, class_of, classes_by_cost, corners, in_order, shapes_in

Positive = Annotated[float, Field(gt=0)]


class ProfilePoint(StrictModel):
    """One measurement: a batch size on a share of the GPU, alone on the device.

    A value that could not be measured or read is absent (None), never a guess. `mig_gpcs`: it was measured in a MIG
    instance of so many GPCs, which `share_pct` is of the GPU. `processes_ms`: how long a batch takes each of 2, 3, …
    equal processes that run it there at once without pause. `sizes`: of a network whose inputs vary, what all requests
    of the batch were padded to, such as {tokens: 64}; empty for fixed shapes.
    """

    batch_size: Annotated[int, Field(ge=1)]
    sizes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    share_pct: Annotated[float, Field(gt=0, le=100)] = 100.0
    mig_gpcs: Annotated[int, Field(ge=1, le=ALL_GPCS)] | None = None
    latency_ms: Positive
    processes_ms: dict[Annotated[int, Field(ge=2)], Positive] = Field(default_factory=dict)
    latency_spread_ms: Annotated[float, Field(ge=0)] | None = None  # half the distance of the 10th and 90th percentile
    throughput_rps: Positive | None = None  # a separate figure if it is more precise than batch / latency
    memory_mib: Annotated[float, Field(ge=0)] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class Fit(StrictModel):
    """The line l(b) = alpha_ms*b + beta_ms through the whole-GPU points, and how well it fits."""

    alpha_ms: float
    beta_ms: float
    r_squared: float | None = None
    max_error_pct: float | None = None


class SizeFit(StrictModel):
    """How well l(b) between the measured sizes is known: so far is it off where a measured size that has others on both
    sides is left out and computed from these."""

    mean_error_pct: float
    max_error_pct: float


class Measured(StrictModel):
    """Where and when a profile was measured."""

    hardware: str
    date: str
    versions: dict[str, str] = Field(default_factory=dict)
    command: str | None = None


OCCUPANCIES = ("achieved_occupancy_pct", "wavg_ach_occ_pct")
"""Metrics of a point that are measured by counters or estimated from launch configurations (`occupancy_estimated`)."""


_USUAL_BATCH = 8  # derived: the largest batch measured by default; size classes are close in what it costs

# What is left out of a point that was not measured at one size of requests.
_NOT_OF_ONE_SIZE: Mapping[str, Any] = {
    "sizes": {},
    "processes_ms": {},
    "latency_spread_ms": None,
    "throughput_rps": None,
}


class ModelProfile(StrictModel):
    """Everything known about one model on one GPU type. Invariant: there is a point, an inline line or `generation`."""

    points: tuple[ProfilePoint, ...] = ()
    line: LinearLatency | None = None  # a latency given as coefficients only, valid for every batch size
    generation: Generation | None = None  # what it costs to generate with the model
    fit: Fit | None = None
    weights_mib: float | None = None
    coefficients: dict[str, float] = Field(default_factory=dict)  # named model constants, such as iGniter's k1..k5
    doubts: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()  # keys or metrics of the points that were estimated and not measured
    network: str | None = None  # source of the measured network, if the row's own name does not say it
    options: dict[str, Any] = Field(default_factory=dict)  # the model's options when measured, such as sequence_length
    run: dict[str, Any] | None = None  # all options of how it was run when measured; None: not known
    pads: bool = True  # whether requests that vary in size can be padded to a larger one
    multiples: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)  # of which sizes are; else of 1
    size_fit: SizeFit | None = None

    @model_validator(mode="after")
    def _same_sizes(self) -> ModelProfile:
        names = {tuple(point.sizes) for point in self.points}
        if len(names) > 1:
            both = " and ".join(str(list(each)) for each in sorted(names)[:2])
            raise Fault(f"its points have different sizes: {both}", "Give each point the same names, in one order.")
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values. It knows nothing that was computed from the values of this profile."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied

    def estimates_occupancy(self, metric: str) -> bool:
        """Return whether an occupancy of the points comes from launch configurations and not from counters."""
        return metric in OCCUPANCIES and any(
            metric in point.metrics and point.metrics.get("occupancy_estimated", 0.0) > 0 for point in self.points
        )

    def scaled(self, factor: float) -> ModelProfile:
        """Return the profile of the same model when each batch takes `factor` times as long. It also scales iGniter's
        coefficients of the active time (equation 11: all but k4)."""
        points = tuple(
            point.model_copy(
                update={
                    "latency_ms": point.latency_ms * factor,
                    "processes_ms": {count: ms * factor for count, ms in point.processes_ms.items()},
                    "throughput_rps": None if point.throughput_rps is None else point.throughput_rps / factor,
                }
            )
            for point in self.points
        )
        line = self.line.scaled(factor) if self.line is not None else None
        active = {key: value * factor for key, value in self.coefficients.items() if key in ("k1", "k2", "k3", "k5")}
        generation = None if self.generation is None else self.generation.scaled(factor)
        update: dict[str, Any] = {"points": points, "line": line, "fit": None, "generation": generation}
        update["coefficients"] = self.coefficients | active
        return self.model_copy(update=update)

    def inside(self, gpcs: int, at_most: float) -> ModelProfile | None:
        """Return the profile in a MIG instance of so many GPCs, all of which is its 100 %; None where none was
        measured.

        Steps of a model that generates are not measured in instances. They count as `at_most` times as long as on the
        whole GPU, which has so many times the compute or the memory bandwidth, whichever is more.
        """
        points = tuple(p.model_copy(update={"share_pct": 100.0}) for p in self.points if p.mig_gpcs == gpcs)
        steps = None
        if self.generation is not None and self.weights_mib is not None:
            steps = self.generation.alone_on_one_gpu(at_most)
        if not points and steps is None:
            return None
        return self.model_copy(update={"points": points, "line": None, "fit": None, "generation": steps})

    def beside_itself(self, batch_size: int, processes: int) -> float | None:
        """Return how many times as long a batch takes each of several equal processes that run it at once without pause
        on the whole device; None where that was not measured.

        Between measured batch sizes and numbers of processes it is on the line through the two nearest; beyond the
        largest number it grows in proportion, as on a device that is full.
        """
        known = {p.batch_size: p for p in self.points if p.share_pct == 100.0 and p.processes_ms}
        if processes < 2 or not known:
            return 1.0 if processes < 2 else None
        sizes = sorted(known)
        low = max((size for size in sizes if size <= batch_size), default=sizes[0])
        high = min((size for size in sizes if size >= batch_size), default=sizes[-1])
        weight = (batch_size - low) / (high - low) if high > low else 0.0
        small, large = (_times_as_long(known[size], processes) for size in (low, high))
        return small + weight * (large - small)

    @cached_property
    def size_names(self) -> tuple[str, ...]:
        """The names of the sizes by which it was measured; empty for fixed shapes."""
        return tuple(self.points[0].sizes) if self.points else ()

    @cached_property
    def measured_sizes(self) -> tuple[Sizes, ...]:
        """The measured sizes in the order of `size_names`, smallest first; empty for fixed shapes."""
        return in_order(tuple(point.sizes.values()) for point in self.points) if self.size_names else ()

    @cached_property
    def size_classes(self) -> tuple[Sizes, ...]:
        """Sizes that batches are padded to, in the same order: of the measured ones and between them, close in cost."""
        if not self.size_names:
            return ()
        keys = set.intersection(*({*points} for points in self._by_sizes.values()))
        usual = max((key for key in keys if key[2] <= _USUAL_BATCH), key=lambda key: (key[0], key[2]), default=None)
        if usual is None:
            return self.measured_sizes
        multiples = [self.multiples.get(name, 1) for name in self.size_names]
        return classes_by_cost({c: points[usual].latency_ms for c, points in self._by_sizes.items()}, multiples)

    def padded_to(self, sizes: Mapping[str, int]) -> ModelProfile:
        """Return the profile of batches whose requests have at most these sizes: that of the smallest class which
        covers them.

        Raises:
            MissingProfileError: it is not measured by these sizes, or not up to them.
        """
        if sizes.keys() != {*self.size_names}:
            known = ", ".join(self.size_names) or "none"
            raise MissingProfileError(f"it is measured by other sizes than {', '.join(sizes) or 'none'}: {known}.")
        place = class_of(self.size_classes, tuple(sizes[name] for name in self.size_names))
        if place is None:
            beyond = ",".join(f"{name}={size}" for name, size in sizes.items())
            raise MissingProfileError(f"no measured sizes cover {beyond}. Profile larger ones with --sizes {beyond}.")
        return self.by_class[self.size_classes[place]]

    @cached_property
    def by_class(self) -> Mapping[Sizes, ModelProfile]:
        """The profile at each of `size_classes`, in their order, with points of fixed shape; empty if it has none."""
        points = {sizes: self._points_at(sizes, self.measured_sizes) for sizes in self.size_classes}
        return {c: self.model_copy(update={"points": tuple(each), "fit": None}) for c, each in points.items()}

    @cached_property
    def _by_sizes(self) -> Mapping[Sizes, Mapping[tuple[float, int | None, int], ProfilePoint]]:
        """The points at each of the measured sizes, by share, MIG instance and batch size."""
        points: dict[Sizes, dict[tuple[float, int | None, int], ProfilePoint]] = {c: {} for c in self.measured_sizes}
        for point in self.points if points else ():
            points[tuple(point.sizes.values())][point.share_pct, point.mig_gpcs, point.batch_size] = point
        return points

    def _points_at(self, sizes: Sizes, grid: Sequence[Sizes]) -> list[ProfilePoint]:
        """Return the points of fixed shape at some sizes, interpolated between those of `grid` around them: of the
        batches that were measured at all of these. Memory is that of the largest of them."""
        axes = [sorted(set(values)) for values in zip(*grid, strict=True)]
        around = [(self._by_sizes[corner], weight) for corner, weight in corners(axes, sizes)]
        if len(around) == 1:
            return [point.model_copy(update={"sizes": {}}) for point in around[0][0].values()]
        interpolated = []
        for key in around[0][0]:
            points = [(known[key], weight) for known, weight in around if key in known]
            if len(points) == len(around):
                memory = [point.memory_mib for point, _ in points if point.memory_mib is not None]
                update = {
                    **_NOT_OF_ONE_SIZE,
                    "latency_ms": sum(weight * point.latency_ms for point, weight in points),
                    "memory_mib": max(memory, default=None),
                }
                interpolated.append(points[-1][0].model_copy(update=update))
        return interpolated

    def fit_sizes(self) -> SizeFit | None:
        """Return how well l(b) between the measured sizes is known; None where no measured size is between others."""
        errors = []
        for axis in range(len(self.size_names)):
            lines: dict[Sizes, list[Sizes]] = {}
            for sizes in sorted(self.measured_sizes):
                lines.setdefault((*sizes[:axis], *sizes[axis + 1 :]), []).append(sizes)
            for line in lines.values():
                for place in range(1, len(line) - 1):
                    measured = self._by_sizes[line[place]]
                    for point in self._points_at(line[place], (line[place - 1], line[place + 1])):
                        key = point.share_pct, point.mig_gpcs, point.batch_size
                        if key in measured:
                            errors.append(100.0 * abs(point.latency_ms / measured[key].latency_ms - 1.0))
        if not errors:
            return None
        mean, most = sum(errors) / len(errors), max(errors)
        return SizeFit(mean_error_pct=round(mean, 2), max_error_pct=round(most, 2))  # format: hundredths

    def mean_over(self, parts: tuple[float, ...], chance: float = 1.0) -> ModelProfile:
        """Return the profile with the mean latency over `size_classes` and the memory of the largest class.

        `parts` has the part of the requests in each class. It has the shares and the batch sizes that every class with
        requests was measured at. `chance`: that two requests have one shape, where each shape of a batch runs by
        itself.
        """
        key = parts, chance
        if key not in self._means:
            self._means[key] = self.model_copy(update={"points": self._mean_points(parts, chance), "fit": None})
        return self._means[key]

    @cached_property
    def _means(self) -> dict[tuple[tuple[float, ...], float], ModelProfile]:
        """The means by the parts of the classes and the chance, as far as they were asked for."""
        return {}

    def _mean_points(self, parts: tuple[float, ...], chance: float) -> tuple[ProfilePoint, ...]:
        chosen = [(part, profile) for part, profile in zip(parts, self.by_class.values(), strict=True) if part]
        keys = [{(p.share_pct, p.mig_gpcs, p.batch_size): p for p in profile.points} for _, profile in chosen]
        common = set(keys[0]).intersection(*keys[1:]) if keys else set()
        if not common:
            raise MissingProfileError("no batch size was measured at all sizes that come. Profile it with --sizes.")
        means, tables = [], dict[tuple[float, int | None], dict[int, float]]()
        order = sorted(common, key=lambda key: (-key[0], key[1] or 0, key[2]))
        for key in order:
            latencies = (part * by_key[key].latency_ms for (part, _), by_key in zip(chosen, keys, strict=True))
            tables.setdefault(key[:2], {})[key[2]] = sum(latencies) / sum(parts)
        for key in order:
            points = [by_key[key] for by_key in keys]
            memory = [point.memory_mib for point in points if point.memory_mib is not None]
            shapes, table = shapes_in(key[2], chance), tables[key[:2]]
            latency_ms = shapes * float(np.interp(key[2] / shapes, list(table), list(table.values())))
            update = {**_NOT_OF_ONE_SIZE, "latency_ms": latency_ms, "memory_mib": max(memory, default=None)}
            means.append(points[-1].model_copy(update=update))
        return tuple(means)

    def shares(self) -> tuple[float, ...]:
        """Return the measured shares in percent, ascending; (100.0,) for a line."""
        return tuple(sorted({point.share_pct for point in self.points})) or (100.0,)

    def batch_sizes(self, share_pct: float = 100.0) -> tuple[int, ...]:
        """Return the measured batch sizes at a share, ascending; empty for a line or an unmeasured share."""
        return tuple(sorted(point.batch_size for point in self.points if point.share_pct == share_pct))

    def point(self, batch_size: int, share_pct: float = 100.0) -> ProfilePoint:
        """Return the measured point.

        Raises:
            MissingProfileError: this combination was not measured.
        """
        for point in self.points:
            if point.batch_size == batch_size and point.share_pct == share_pct:
                return point
        raise MissingProfileError(
            f"no measurement at batch size {batch_size} and share {share_pct:g} %. Measured shares: {self.shares()}."
        )

    def latency(self, share_pct: float = 100.0) -> LatencyTable | LinearLatency:
        """Return l(b) at a share.

        Raises:
            MissingProfileError: the share was not measured and is not between two measured ones.
        """
        if self.line is not None:
            if share_pct != 100.0:
                raise MissingProfileError(
                    f"share {share_pct:g} %: an inline latency is known for the whole GPU only. Give a profile instead."
                )
            return self.line
        if self.size_names:
            raise MissingProfileError(f"its latency is by {', '.join(self.size_names)}. Say which sizes come: `sizes`.")
        if share_pct not in self._tables:
            exact = {p.batch_size: p.latency_ms for p in self.points if p.share_pct == share_pct}
            self._tables[share_pct] = LatencyTable(points=exact or self._between_shares(share_pct))
        return self._tables[share_pct]

    @cached_property
    def _tables(self) -> dict[float, LatencyTable]:
        """The latencies by share, as far as they were asked for."""
        return {}

    def _between_shares(self, share_pct: float) -> dict[int, float]:
        """Interpolate the latencies of the batches that were measured on both of the nearest shares."""
        outside = f"the measured shares {self.shares()}. Profile it with --shares."
        below, above, weight = between_shares(self.shares(), share_pct, outside)
        low, high = self.latency(below), self.latency(above)
        common = set(self.batch_sizes(below)) & set(self.batch_sizes(above))
        if not common:
            raise MissingProfileError(f"no batch size was measured at both {below:g} % and {above:g} %. Profile it.")
        return {b: low.at(b) * (1 - weight) + high.at(b) * weight for b in sorted(common)}

    def latency_ms(self, batch_size: int, share_pct: float = 100.0) -> float:
        """Return the latency of one batch in ms; see `latency` for the errors."""
        return self.latency(share_pct).at(batch_size)

    def throughput_rps(self, batch_size: int, share_pct: float = 100.0) -> float:
        """Return requests per second when batches of this size follow each other without a gap."""
        stated = self._stated_rps.get((batch_size, share_pct))
        return 1000.0 * batch_size / self.latency_ms(batch_size, share_pct) if stated is None else stated

    @cached_property
    def _stated_rps(self) -> dict[tuple[int, float], float]:
        """The throughput figures of points that have one, by batch size and share."""
        rates = ((p.batch_size, p.share_pct, p.throughput_rps) for p in reversed(self.points))
        return {(size, share): rate for size, share, rate in rates if rate is not None}

    @cached_property
    def gpu_ms(self) -> float:
        """The whole-GPU time in ms of a request where the network uses its share best.

        This is the least latency * share / batch size of all measured points; for a line, its slope.
        """
        if not self.points and self.line is not None:
            return self.line.alpha_ms
        return min(point.latency_ms * point.share_pct / 100.0 / point.batch_size for point in self.points)

    @cached_property
    def metrics_by_share(self) -> dict[str, dict[float, dict[int, float]]]:
        """The metrics of the points by name, share and batch size."""
        metrics: dict[str, dict[float, dict[int, float]]] = {}
        for point in self.points:
            for name, value in point.metrics.items():
                metrics.setdefault(name, {}).setdefault(point.share_pct, {})[point.batch_size] = value
        return metrics

    @cached_property
    def measured_memory(self) -> list[ProfilePoint]:
        """The points whose memory was measured."""
        return [point for point in self.points if point.memory_mib is not None]

    def memory_mib(self, batch_size: int, share_pct: float = 100.0) -> float | None:
        """Return the memory of one replica at the next larger measured batch size; None if it was not measured."""
        larger = (p for p in self.measured_memory if p.batch_size >= batch_size)
        nearest = min(larger, key=lambda p: (p.batch_size, abs(p.share_pct - share_pct)), default=None)
        return None if nearest is None else nearest.memory_mib


def _times_as_long(point: ProfilePoint, processes: int) -> float:
    """Return `beside_itself` at a measured batch size."""
    factors = {1: 1.0} | {count: max(1.0, ms / point.latency_ms) for count, ms in point.processes_ms.items()}
    most = max(factors)
    if processes >= most:
        return factors[most] * processes / most
    low = max(count for count in factors if count <= processes)
    high = min(count for count in factors if count >= processes)
    weight = (processes - low) / (high - low) if high > low else 0.0
    return factors[low] + weight * (factors[high] - factors[low])


class CoRunPart(StrictModel):
    """One of several models that ran at once without pause, with its latency while all of them did."""

    model: str
    batch_size: Annotated[int, Field(ge=1)]
    share_pct: Annotated[float, Field(gt=0, le=100)] = 100.0
    latency_ms: Positive
    latency_spread_ms: Annotated[float, Field(ge=0)] | None = None
    runs: Annotated[int, Field(ge=1)] | None = None  # number of runs during the time in which all models ran
    metrics: dict[str, float] = Field(default_factory=dict)


class CoRun(StrictModel):
    """A measurement of several processes on one device. With a single part, it is a model alone in the same set-up."""

    parts: Annotated[tuple[CoRunPart, ...], Field(min_length=1)]
    metrics: dict[str, float] = Field(default_factory=dict)  # metrics of the whole device: power_w, sm_clock_mhz


class Profile(StrictModel):
    """A profile file: several models on one GPU type."""

    schema_version: SchemaVersion = SCHEMA
    name: str
    gpu_type: str
    source: str
    measured: Measured | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None  # memory of the device that was measured
    coefficients: dict[str, float] = Field(default_factory=dict)  # of the hardware, such as iGniter's alpha_f
    doubts: tuple[str, ...] = ()
    models: dict[str, ModelProfile]
    co_runs: tuple[CoRun, ...] = ()  # raw measurements from which interference coefficients are fitted

    def dump(self) -> str:
        """Render as YAML; `Profile.load` of the text gives an equal profile."""
        data: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return dump_yaml({"schema": SCHEMA, **data})


class Profiles:
    """Several profile files, looked up by model row and GPU type. Earlier files win over later ones, and those of a
    type itself over those that hold for it (`tenuto.profiles.gpu_types.measured_as`)."""

    def __init__(self, profiles: Iterable[Profile]) -> None:
        self._profiles = tuple(profiles)
        self._inside: dict[
            tuple[int, int, str], ModelProfile | None
        ] = {}  # one object per row and size, for others' tables

    def __iter__(self) -> Any:
        return iter(self._profiles)

    def gpu_types(self) -> tuple[str, ...]:
        """Return the GPU types covered."""
        return tuple(dict.fromkeys(profile.gpu_type for profile in self._profiles))

    def for_type(self, gpu_type: str) -> Mapping[str, ModelProfile]:
        """Return every model measured on a GPU type."""
        rows = dict.fromkeys(name for file in self._of_type(gpu_type) for name in file.models)
        models = {name: self._row(name, gpu_type) for name in rows}
        return {name: model for name, model in models.items() if model is not None}

    def _row(self, name: str, gpu_type: str) -> ModelProfile | None:
        """Return the first profile of a row that holds for a GPU type; None when there is none."""
        instance = instance_type_of(gpu_type)
        for file in self._of_type(gpu_type):
            model = file.models.get(name)
            if model is not None and instance is not None and file.gpu_type != gpu_type:
                model = self._within(model, instance)
            if model is not None:
                return model
        return None

    def _within(self, model: ModelProfile, instance: InstanceType) -> ModelProfile | None:
        key = (id(model), instance.gpcs, instance.profile)
        if key not in self._inside:
            self._inside[key] = model.inside(instance.gpcs, instance.at_most)
        return self._inside[key]

    def is_of_whole_gpu(self, row: str, gpu_type: str) -> bool:
        """Return whether a row for a MIG instance follows from measurements on the whole GPU."""
        own = (file for file in self._profiles if file.gpu_type == gpu_type)
        return instance_type_of(gpu_type) is not None and all(row not in file.models for file in own)

    def _of_type(self, gpu_type: str) -> list[Profile]:
        return [file for kind in measured_as(gpu_type) for file in self._profiles if file.gpu_type == kind]

    def hardware(self, gpu_type: str) -> Mapping[str, float]:
        """Return the hardware coefficients of a GPU type, empty where none are known."""
        coefficients: dict[str, float] = {}
        for file in self._of_type(gpu_type):
            coefficients = {**file.coefficients, **coefficients}
        return coefficients

    def measured(self, row: str, gpu_type: str) -> Measured | None:
        """Return where and when a row was measured; None if its file does not say, or there is no such row."""
        files = (file for file in self._of_type(gpu_type) if row in file.models)
        first = next(files, None)
        return None if first is None else first.measured

    def get(self, row: str, gpu_type: str) -> ModelProfile:
        """Return the profile of a model on a GPU type.

        Raises:
            InvalidInputError: no profile has this row for this type; the message lists those that exist.
        """
        model = self._row(row, gpu_type)
        if model is not None:
            return model
        models = self.for_type(gpu_type)
        if not models:
            known = ", ".join(self.gpu_types())
            raise refused(
                "profiles",
                gpu_type,
                f"no profile was measured on GPU type '{gpu_type}'",
                "Measure one with `tenuto profile`, or pass --profiles."
                + (f" Types with profiles: {known}." if known else ""),
            )
        raise refused(
            "profiles",
            row,
            f"no profile of '{row}' on GPU type '{gpu_type}'",
            f"{one_of(row, sorted(models), 'Known:')} Measure the model's `source` with `tenuto profile`, give "
            "`profile:` in the workload, or a further profile with --profiles (shipped ones: `tenuto profiles`).",
        )
