"""Versions of a model: their names, how its requests are split among them, and what may not be.

Each version is a model of its own to planner, scheduler and gpu-lets, called `NAME:VERSION`; version 1 is called
`NAME`. Only the way in and the figures know that they belong together. One version takes the rest: the one that has no
share and is no shadow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.networks.catalogue import ModelSignature, lookup

FIRST = "1"  # format: the version of a model that has no other, as clients of the protocol know it
_SHADOWS_WEIGHT = 1e-3  # derived: of its model's weight: no plan gives up a request for fewer than a thousand copies
# What a short entry does not take from the version that takes the rest.
_OWN = ("name", "rate_rps", "alone", "share_pct", "shadow")


class Versioned(Protocol):
    """A model of the workload, as far as versions are concerned."""

    @property
    def name(self) -> str:
        """Its own name."""

    @property
    def model(self) -> str:
        """The name that clients know, which all versions have."""

    @property
    def version(self) -> str:
        """Which one it is."""

    @property
    def share_pct(self) -> float | None:
        """The part of the requests it is sent."""

    @property
    def shadow(self) -> bool:
        """Whether these are copies."""

    @property
    def network(self) -> str:
        """Source of the network, or its name in the catalogue."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the executor."""


VersionT = TypeVar("VersionT", bound=Versioned)


def split_name(name: str) -> tuple[str, str]:
    """Return model and version of a name in the workload."""
    model, _, version = name.partition(":")
    return model, version or FIRST


def versioned(model: str, version: str) -> str:
    """Return the name of a version in the workload."""
    return model if version == FIRST else f"{model}:{version}"


def path_of(name: str) -> str:
    """Return how URLs name a model, or NAME:VERSION."""
    model, _, version = name.partition(":")
    return f"{model}/versions/{version}" if version else model


def by_model(specs: Iterable[VersionT]) -> dict[str, list[VersionT]]:
    """Return the versions of every model that has others than version 1."""
    specs = list(specs)
    versions: dict[str, list[VersionT]] = {spec.model: [] for spec in specs if spec.version != FIRST}
    if versions:
        for spec in specs:
            if spec.model in versions:
                versions[spec.model].append(spec)
    return versions


def taking_the_rest(versions: Iterable[VersionT]) -> VersionT | None:
    """Return the version that is sent what the others of its model are not; None where all have a share."""
    return next((spec for spec in versions if spec.share_pct is None and not spec.shadow), None)


def shared_out(
    rates: Mapping[str, float], running: Sequence[Versioned], wanted: Sequence[Versioned]
) -> dict[str, float]:
    """Return what the models that are wanted will be asked, where the splits that run become those that are wanted.

    Args:
        rates: what they are asked now, by name.
        running: the versions that share the requests now.
        wanted: all models that are asked for.
    """
    rates_after = {spec.name: rates[spec.name] for spec in wanted if spec.name in rates}
    before, after = by_model(running), by_model(wanted)
    for model in before.keys() | after.keys():
        old = [spec for spec in running if spec.model == model]
        new = [spec for spec in wanted if spec.model == model]
        rest = taking_the_rest(new)
        if rest is None or splits(old) == splits(new):
            continue
        shares = {s.name: s.share_pct or 0.0 for s in new if s is not rest and not s.shadow}
        by_name = {s.name for s in old if s.share_pct == 0.0 and shares.get(s.name) == 0.0}  # asked by URL alone
        total = sum(rates.get(s.name, 0.0) for s in old if not s.shadow and s.name not in by_name)
        if total <= 0.0:
            continue
        rates_after[rest.name] = total * (1.0 - sum(shares.values()) / 100.0)
        for spec in new:
            if spec.shadow:
                rates_after[spec.name] = total * (100.0 if spec.share_pct is None else spec.share_pct) / 100.0
            elif shares.get(spec.name):
                rates_after[spec.name] = total * shares[spec.name] / 100.0
    return rates_after


def splits(versions: Iterable[Versioned]) -> set[tuple[str, float | None, bool]]:
    """Return what each of these is sent, to compare."""
    return {(spec.name, spec.share_pct, spec.shadow) for spec in versions}


# --- a file's entries -------------------------------------------------------------------------------------------------


def completed(entries: Sequence[Any]) -> list[Any]:
    """Return the entries of a file with what their versions do not say.

    A version without an SLO takes what it does not say from the version that takes the rest. Versions without
    `rate_rps` have their shares of the rate of that one, which is then what all of them are asked together.
    """
    raw = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in raw:
        groups.setdefault(split_name(entry["name"])[0], []).append(entry)
    replaced: dict[int, dict[str, Any]] = {}
    for group in groups.values():
        rest = next((e for e in group if _has_slo(e) and e.get("share_pct") is None and not e.get("shadow")), None)
        short = [e for e in group if e is not rest and not (_has_slo(e) and "rate_rps" in e)]
        if rest is None or not short:
            continue
        total, given = _number(rest.get("rate_rps")), 0.0
        for entry in short:
            full = entry if _has_slo(entry) else {**inherited(rest, entry), **entry}
            share = full.get("share_pct")
            share = _number(100.0 if share is None and full.get("shadow") else share)
            if "rate_rps" not in full and total and share:
                full = {**full, "rate_rps": total * share / 100.0}
                given += 0.0 if full.get("shadow") else share
            replaced[id(entry)] = full
        if 0.0 < given < 100.0:
            replaced[id(rest)] = {**rest, "rate_rps": total * max(0.0, 100.0 - given) / 100.0}
    return [replaced.get(id(entry), entry) for entry in entries]


def inherited(rest: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a version has of the one that takes the rest: network and cost too, unless it names its own."""
    entries = {key: value for key, value in rest.items() if key not in _OWN}
    if "latency" in entry or "profile" in entry:
        entries.pop("latency", None)
        entries.pop("profile", None)
    if "source" in entry:
        entries.pop("weights_path", None)
    if entry.get("shadow"):
        entries["weight"] = _SHADOWS_WEIGHT * (_number(entries.get("weight")) or 1.0)
    return entries


def _has_slo(entry: Mapping[str, Any]) -> bool:
    return "slo_ms" in entry or "slo" in entry


def _number(value: object) -> float:
    """Return a number of a file; 0 for anything else and for one that no float holds, which the schema refuses."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else 0.0


# --- what may not be --------------------------------------------------------------------------------------------------


def split_problems(specs: Sequence[Versioned], prefix: str = "") -> Iterator[Problem]:
    """Yield what is wrong with the splits of models; `prefix` begins the paths."""
    place = {spec.name: f"{prefix}models.{index}" for index, spec in enumerate(specs)}
    groups = by_model(specs)
    for spec in specs:
        if spec.model not in groups and (spec.share_pct is not None or spec.shadow):
            key = "shadow" if spec.shadow else "share_pct"
            cure = f"Remove it, or add another version, such as '{spec.model}:2', and give that one a share."
            yield Problem(f"{place[spec.name]}.{key}", getattr(spec, key), "is of the only version there is", cure)
    for model, versions in groups.items():
        rests = [spec for spec in versions if spec.share_pct is None and not spec.shadow]
        if len(rests) != 1:
            names = ", ".join(spec.name for spec in rests or versions)
            rule = f"{len(rests)} versions of '{model}' take the rest, not one ({names})"
            cure = "Give share_pct or shadow to all versions but one; share_pct: 0 is asked by its URL alone."
            yield Problem(place[versions[0].name], versions[0].name, rule, cure)
            continue
        shares = {spec.name: spec.share_pct or 0.0 for spec in versions if spec is not rests[0] and not spec.shadow}
        if sum(shares.values()) >= 100.0:
            rule = f"the shares of '{model}' leave nothing to {rests[0].name}, which takes the rest"
            cure = "Let them add up to less than 100, or promote one: `tenuto model promote`."
            yield Problem(f"{place[rests[0].name]}", ", ".join(f"{n} {v:g} %" for n, v in shares.items()), rule, cure)
        for spec in versions:
            why = _why_other(rests[0], spec)
            if why is not None:
                cure = "Versions answer the same clients: give it a name of its own."
                yield Problem(place[spec.name], spec.name, why, cure)


def _why_other(rest: Versioned, spec: Versioned) -> str | None:
    """Return why a version cannot stand in for another, as far as that is known before it is loaded."""
    own, others = _tensors(spec), _tensors(rest)
    return None if own is None or others is None else why_not_interchangeable(others, own, rest.name)


Tensors = tuple[list[tuple[str, str, tuple[int | str, ...]]], list[tuple[str, str, tuple[int | str, ...]]]]


def tensors_of(signature: ModelSignature) -> Tensors:
    """Return names, types and shapes of inputs and outputs."""
    return (
        [(t.name, t.dtype, tuple(t.shape)) for t in signature.inputs],
        [(t.name, t.dtype, tuple(t.shape)) for t in signature.outputs],
    )


def why_not_interchangeable(rest: Tensors, other: Tensors, name: str) -> str | None:
    """Return what a version takes or gives that the one called `name` does not; None where they are alike."""
    for kind, own, others in zip(("inputs", "outputs"), other, rest, strict=True):
        if own != others:
            return f"has {kind} {_shown(own)}, and {name} has {_shown(others)}"
    return None


def _shown(tensors: Iterable[tuple[str, str, tuple[int | str, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in tensors)


def _tensors(spec: Versioned) -> Tensors | None:
    """Return the tensors that options or the catalogue name; None where only the loaded network knows."""
    given = spec.options
    if "inputs" in given and "outputs" in given:
        try:
            inputs, outputs = (
                [(t["name"], t["dtype"], tuple(t["shape"])) for t in given[key]] for key in ("inputs", "outputs")
            )
        except (KeyError, TypeError):
            return None  # whoever loads it says what is wrong
        return inputs, outputs
    try:
        return tensors_of(lookup(spec.network).signature)
    except InvalidInputError:
        return None
