"""The published numbers with which an experiment is compared, and the thesis' test bed: clients, network, wait limit.

Source of all numbers: P. Elvinger, ETH Zurich master thesis 2024, chapters 4 and 6 and appendix A.2, as kept in
`lab/tenuto_lab/experiments/data/thesis_experiments.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from tenuto.batching.core.system import NetworkDelay

# Models whose requests are images of 602,112 bytes; the others' are token ids of 4 to 8 KB.
VISION = frozenset({"alexnet", "densenet121", "efficientnet_b7", "inception_v3", "mobilenet_v2", "resnet50", "vgg19"})

# Section 6.2.1 prints what reached the replicas at a target of 500 r/s per model: 433.34 r/s.
_STATED_SHARE = {"6.2.1": 433.34 / 500.0}


@cache
def thesis_facts() -> Mapping[str, Any]:
    """Return the whole document."""
    return read_data("thesis_experiments.json")


def read_data(name: str) -> Mapping[str, Any]:
    """Return a document of this package's data."""
    text = resources.files("tenuto_lab.experiments").joinpath(f"data/{name}").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def thesis_section(section: str) -> Mapping[str, Any]:
    """Return one experiment's entry by its section number; KeyError if there is none."""
    for entry in thesis_facts()["experiments"]:
        if entry["id"] == section:
            found: Mapping[str, Any] = entry
            return found
    raise KeyError(section)


def client_share(section: str, total_rps: float) -> float:
    """Return which part of the target rate the thesis' clients reached.

    It is the number of the section if that prints one. Otherwise it follows from table 4.1 (four clients) by the total
    rate, on the line between its rows.
    """
    if section in _STATED_SHARE:
        return _STATED_SHARE[section]
    table = thesis_facts()["clients"]["achieved_vs_target_rps"]
    targets = sorted(int(key) for key in table if key.isdigit())
    reached = [float(np.mean(table[str(target)])) / target for target in targets]
    return float(np.interp(total_rps, [4.0 * target for target in targets], reached))


def _image_ms() -> float:
    """Return the network time of one image: the printed point of figure 4.5 less the ping, divided by its images."""
    model = thesis_facts()["network_latency_model"]
    point = model["known_points"][0]
    images = point["bytes"] / thesis_facts()["models"]["inputs"]["vision_input_bytes"]
    return float((point["latency_ms"] - thesis_facts()["environment"]["ping_ms"]) / images)


def network_of(models: Sequence[str]) -> NetworkDelay:
    """Return the delays of the thesis' network, on a line through the printed points of figure 4.5.

    The coefficients of the three curves are not printed. Two points are: 8.7 ms for a batch of 16 images, and a ping of
    0.322 ms. The ping is taken as the delay of the smallest message, of token ids and of answers. The data delay is
    that of the largest input among the models, which a scheduler should budget; `data_ms_by_model` has each model's
    own.
    """
    ping = float(thesis_facts()["environment"]["ping_ms"])
    return NetworkDelay(ping, max(data_ms_by_model(models), default=0.0), ping)


def data_ms_by_model(models: Sequence[str]) -> list[float]:
    """Return the network time of one request's data by model, in ms."""
    image = _image_ms()
    tokens = image * thesis_facts()["network_latency_model"]["language_request_bytes"][1]
    per_token_request = tokens / thesis_facts()["models"]["inputs"]["vision_input_bytes"]
    return [image if name in VISION else per_token_request for name in models]
