"""SLOs by rule in a workload file: `slo: 2 x l(1)`, twice what one request takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, Problem, raise_if_any, refused
from tenuto.placement.cluster import Cluster
from tenuto.placement.costs import costs_of
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import Profiles

_RULE = re.compile(r"(\d+(?:\.\d+)?) x l\(([1-9]\d*)\)")


def load_workload(path: str | Path, cluster: Cluster | None, profiles: Profiles | None) -> Workload:
    """Read a workload file, with `slo_ms` for every `slo` by rule: a multiple of what the batch takes alone on a whole
    GPU, of the cluster's fastest type for it. When cluster or profiles are None, their faults are reported elsewhere,
    and a rule counts as 1 ms.

    Raises:
        InvalidInputError: as `Workload.load`, a malformed rule, or a rule for a batch that was not measured.
    """
    data = load_document(path)
    models = data.get("models") if isinstance(data, dict) else None
    problems: list[Problem] = []
    for index, entry in enumerate(models if isinstance(models, list) else ()):
        if isinstance(entry, dict) and "slo" in entry and not isinstance(entry["slo"], dict) and "slo_ms" not in entry:
            rule = entry.pop("slo")
            entry["slo_ms"] = 1.0
            try:
                entry["slo_ms"] = _slo_ms(f"{path}: models.{index}", rule, entry, cluster, profiles)
            except InvalidInputError as error:
                problems += error.problems
    try:
        workload = Workload.of_document(data, str(path))
    except InvalidInputError as error:
        raise InvalidInputError([*problems, *error.problems]) from None
    raise_if_any(problems)
    return workload


def _slo_ms(where: str, rule: Any, entry: dict[str, Any], cluster: Cluster | None, profiles: Profiles | None) -> float:
    match = _RULE.fullmatch(rule) if isinstance(rule, str) else None
    if match is None or not float(match[1]):
        cure = "Write for example `slo: 2 x l(1)`, a number as `slo_ms`, or {ttft_ms: …, tpot_ms: …}."
        raise refused(f"{where}.slo", rule, "is not a factor, x, and l of a batch size", cure)
    try:
        alone = {key: value for key, value in entry.items() if key not in ("share_pct", "shadow")}
        spec = ModelSpec.model_validate({"rate_rps": 1.0, **alone})
    except ValidationError:
        return 1.0  # parsing the workload reports this
    if cluster is None or profiles is None:
        return 1.0
    by_type = costs_of(Workload(models=(spec,)), cluster, profiles)[spec.name]
    size, takes_ms = int(match[2]), list[float]()
    for kind in cluster.gpu_types:
        steps = by_type[kind].steps(most=int(match[2])) if kind in by_type else ()
        takes_ms += steps[size : size + 1]
    if not by_type:
        for kind in cluster.gpu_types:
            profile_of(spec, kind, profiles)  # raises with what is missing
    if not takes_ms:
        cure = "Name a batch size that was measured."
        raise refused(f"{where}.slo", rule, f"a batch of {size} was not measured", cure)
    return round(float(match[1]) * min(takes_ms), 3)
