"""The services of Alibaba's gpu-v2025 trace: how many GPU instances of each are live, minute by minute.

The file is `cluster-trace-gpu-v2025/disaggregated_DLRM_trace.csv` of github.com/alibaba/clusterdata (2 MB, 156 services
over 31 days); it is not shipped. An instance of the role `HN` has a GPU. It counts from its creation to its deletion;
an empty time lies before or after the trace. Seconds count from the trace's start.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto.files import csv_rows, parse_number

__all__ = ["DAYS", "live_gpus"]

DAYS = 31
COLUMNS = ("role", "app_name", "gpu_request", "creation_time", "deletion_time")
CURE = "Give disaggregated_DLRM_trace.csv of github.com/alibaba/clusterdata, cluster-trace-gpu-v2025, as published."


def live_gpus(path: Path, first: int, minutes: int) -> dict[str, NDArray[np.float64]]:
    """Return by service the mean of its live GPUs in each of so many minutes from minute `first` of the trace on, which
    may lie before its start; services that have none are left out.

    Raises:
        InvalidInputError: a missing, cut or malformed file (with its line), or none that is live.
    """
    edges: dict[str, NDArray[np.float64]] = {}
    with csv_rows(path, COLUMNS, CURE) as (header, rows):
        role, service, gpus, begin, end = (header[name] for name in COLUMNS)
        for line, row in rows:
            try:
                if row[role] not in ("CN", "HN") or not row[service]:
                    raise ValueError("has a role other than CN and HN, or no app_name")
                count, born, died = parse_number(row[gpus]), _seconds(row[begin], -math.inf), _seconds(row[end])
                if not (count >= 0.0 and died >= born):
                    raise ValueError("has less than no GPU, or ends before it begins")
            except ValueError as error:
                raise refused(f"{path}: line {line}", ",".join(row), str(error), CURE) from None
            if row[role] == "HN":
                changes = edges.setdefault(row[service], np.zeros(minutes + 2))
                for at, change in ((born, count), (died, -count)):
                    minute = min(max(at / 60.0 - first, 0.0), float(minutes))
                    whole = int(minute)
                    changes[whole] += change * (1.0 - (minute - whole))
                    changes[whole + 1] += change * (minute - whole)
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            raise refused(str(path), None, "its last line is cut", CURE)
    live = {name: changes.cumsum()[:minutes].clip(0.0) for name, changes in edges.items()}
    live = {name: counts for name, counts in live.items() if counts.max() > 1e-6}
    if not live:
        raise refused(str(path), None, "no instance has a GPU in these minutes", CURE)
    return live


def _seconds(text: str, empty: float = math.inf) -> float:
    return float(parse_number(text)) if text else empty
