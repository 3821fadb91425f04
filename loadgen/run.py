"""A finished run, measured or simulated, read from its files: the result document and the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.documents import SCHEMA
from tenuto.errors import refused
from tenuto.files import parse_json, read_text
from tenuto.loadgen.records import ABSENT, WIDE, Records
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.placement.generates import TokenSlo

_KEYS = ("models", "verdict", "options", "window_ms", "slos_ms")


@dataclass(frozen=True)
class Run:
    """A result document (result.json) and its requests. `begin_ms` and `end_ms` bound the measured window."""

    document: Mapping[str, Any]
    records: Records
    plan: Plan | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of models and applications by index."""
        return (*self.document["models"], *self.applications)

    @property
    def applications(self) -> Mapping[str, Mapping[str, Any]]:
        """Figures of every application by name."""
        return self.document.get("applications") or {}

    @property
    def begin_ms(self) -> float:
        """Start of the measured window."""
        return float(self.document["window_ms"][0])

    @property
    def end_ms(self) -> float:
        """End of the measured window."""
        return float(self.document["window_ms"][1])

    @property
    def window_s(self) -> float:
        """Length of the measured window."""
        return max(1e-9, (self.end_ms - self.begin_ms) / 1000.0)

    @property
    def measured(self) -> Records:
        """The requests scheduled within the measured window."""
        return self.records.within(self.begin_ms, self.end_ms)

    def by_name(self) -> dict[str, Records]:
        """Return the requests scheduled within the measured window, of each model and application."""
        measured = self.measured
        return {name: measured.where(measured.model == index) for index, name in enumerate(self.names)}

    @property
    def slos_ms(self) -> Mapping[str, float]:
        """The SLO by which each model and application was judged."""
        return {**self.document["slos_ms"], **{name: row["slo_ms"] for name, row in self.applications.items()}}

    @property
    def token_slos(self) -> dict[str, TokenSlo]:
        """The two bounds by which each model that generates was judged, and each application that streams."""
        stated: Mapping[str, Any] = self.document.get("token_slos") or {}  # absent before models could generate
        return {name: TokenSlo(**slo) for name, slo in stated.items() if name in self.names}

    @property
    def label(self) -> str:
        """Where the numbers come from: simulated, measured on emulated GPUs, or measured."""
        if self.document.get("kind") == "simulation":
            return "simulated in virtual time"
        emulated = self.document.get("emulated")
        if emulated is None:
            return "measured; the endpoint was gone at the end, so whether GPUs were emulated is unknown"
        return "measured over HTTP on emulated GPUs" if emulated else "measured over HTTP"


def load_document(folder: str | Path) -> dict[str, Any]:
    """Return the result.json of a run.

    Raises:
        InvalidInputError: there is no result.json, or it cannot be read as one.
    """
    path = Path(folder) / "result.json"
    document = parse_json(read_text(path), str(path))
    if not isinstance(document, dict):
        raise refused(str(path), None, "is no mapping", "Give a folder that `tenuto bench -o` wrote.")
    if document.get("schema", SCHEMA) != SCHEMA:
        rule = f"is of schema {document['schema']}, and this version reads schema {SCHEMA}"
        raise refused(str(path), None, rule, "Read it with the version of Tenuto that wrote it.")
    missing = [key for key in _KEYS if key not in document]
    if missing:
        raise refused(str(path), ", ".join(missing), "keys are missing", "Give a folder that `tenuto bench -o` wrote.")
    found: dict[str, Any] = document
    return found


def load_run(folder: str | Path) -> Run:
    """Read result.json and requests.parquet.

    Raises:
        InvalidInputError: one of them is missing or broken.
    """
    document = load_document(folder)
    plan = (
        Plan.from_data(document["plan"], origin=f"{folder}/result.json: plan", is_whole=False)
        if document.get("plan")
        else None
    )
    names = [*document["models"], *(document.get("applications") or {})]
    return Run(document, _read_records(Path(folder) / "requests.parquet", names), plan)


def _read_records(path: Path, names: list[str]) -> Records:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        model = table["model"].combine_chunks().cast(pyarrow.string()).dictionary_encode()
        order = np.array([names.index(name) for name in model.dictionary.to_pylist()], dtype=np.int32)
        outcome = table["outcome"].combine_chunks().cast(pyarrow.string()).dictionary_encode()
        codes = np.array([Outcome[name.upper()] for name in outcome.dictionary.to_pylist()], dtype=np.int8)
        columns = {
            name: np.asarray(table[name].to_numpy(), dtype=dtype)
            for name, dtype in Records.columns().items()
            if (name in table.column_names or name not in ABSENT) and name not in ("model", "outcome", "gpulet", *WIDE)
        }
        columns["model"] = order[model.indices.to_numpy()] if len(table) else np.empty(0, np.int32)
        columns["outcome"] = codes[outcome.indices.to_numpy()] if len(table) else np.empty(0, np.int8)
        columns["gpulet"] = table["gpulet"].combine_chunks().cast(pyarrow.string()).to_numpy(zero_copy_only=False)
        return Records(**columns)
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise refused(
            str(path), str(path), f"cannot be read ({error})", "Give a folder that `tenuto bench -o` wrote."
        ) from error
