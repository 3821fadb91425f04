"""MuxServe's experiment in virtual time: 16 LLaMAs on four nodes of 8 A100s, at five peaks.

Placed by MuxServe, by its spatial baseline (each model on GPUs of its own), and on gpu-lets with shares of their own.
The step times are the fitted ones, so that all three run on the same model of the GPU, with the same host times.

What the published runs tell and the paper does not is taken from the logs of its artefact, as numbers: the mean lengths
of each model's requests, the longest output, the GPUs of the baseline, the scheduler's time for each sequence.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto_lab.generation import gpulets, muxserve
from tenuto_lab.generation.multiplexed import Model, Request, Unit, run
from tenuto_lab.generation.muxserve import LanguageModel, Mesh
from tenuto_lab.generation.step_times import Cell, StepTimes, by_model, fit

NODES, GPUS_PER_NODE = 4, 8
REQUESTS = 4089
"""format: the requests of each published run."""
SLO_TIMES_ALONE = 8.0
"""paper: a request is in time when it takes at most so many times as long as alone."""
LONGEST = 512
"""paper (its logs): the longest output, and here the longest prompt."""
PLANNED_LENGTHS = (161.0, 337.0)
"""paper (its artefact): the mean lengths that MuxServe's planner assumes."""
MOST_SEQUENCES = 256
"""paper (its artefact): sequences of a model, unless its planned batch is larger."""
HOST_MS_PER_LAYER = {1: 0.125, 2: 0.2, 4: 0.2, 8: 0.2}
"""fitted on the published spatial run at peak 8: what a step takes beside the fitted time, by GPUs. Nothing of another
peak or policy went into it; without it the TPOT of lightly loaded models comes out a quarter to a third too low."""
MEAN_TOKENS = (
    *((69, 315), (135, 110), (103, 106), (108, 321), (127, 113), (93, 157), (102, 200), (137, 131)),
    *((63, 190), (42, 287), (85, 358), (129, 179), (145, 136), (116, 243), (125, 163), (81, 240)),
)
"""paper (its logs): the mean prompt and output of llm-1, llm-2, …"""
SPATIAL_GPUS = (1, 2, 1, 1, 2, 2, 1, 2, 2, 4, 2, 2, 1, 4, 1, 4)
"""paper (its artefact): the GPUs of llm-1, llm-2, … in the spatial baseline."""


@dataclass(frozen=True)
class Llama:
    """A size of LLaMA: weights in billions, layers, width; the share of its prefills and the GPUs of its latency alone,
    both as in the artefact; its size relative to 7B."""

    parameters: float
    layers: int
    width: int
    prefill_share: float
    gpus_alone: int
    scale: float

    @property
    def weights_mib(self) -> float:
        """Its weights in 16 bits."""
        return self.parameters * 2e9 / 2**20

    @property
    def kv_mib_per_token(self) -> float:
        """Keys and values of a token in 16 bits."""
        return 4 * self.layers * self.width / 2**20


SIZES = {
    "llama-7b": Llama(6.738, 32, 4096, 80, 1, 1),
    "llama-13b": Llama(13.016, 40, 5120, 90, 1, 2),
    "llama-30b": Llama(32.529, 60, 6656, 100, 4, 4),
    "llama-65b": Llama(65.286, 80, 8192, 100, 8, 8),
}
_HOST_MS_PER_SEQUENCE = {"llama-7b": 0.1, "llama-13b": 0.08, "llama-30b": 0.07, "llama-65b": 0.07}
"""paper (its artefact): the scheduler's time for each sequence of a step."""


@dataclass(frozen=True)
class Score:
    """What a run reached: the mean of the models' throughputs in requests/s, weighted by their requests, as published;
    requests in time per second of arrivals, and as a part of all; mean TTFT and TPOT in s."""

    throughput_rps: float
    in_time_rps: float
    attainment: float
    ttft_s: float
    tpot_s: float


class Experiment:
    """The published workloads, and the fitted step times of the models in them."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.size_of: dict[str, str] = dict(facts["models"])
        self.workloads = {int(peak): workload for peak, workload in facts["workloads"].items()}
        self.published = {int(peak): tuple(both) for peak, both in facts["reached"]["throughput_rps"].items()}
        cells = (Cell(*row) for row in facts["rows"])
        self.times: dict[str, dict[int, StepTimes]] = defaultdict(dict)
        for (size, gpus), group in by_model(cells).items():
            self.times[size][gpus] = fit(group)

    @classmethod
    def load(cls, path: Path) -> Experiment:
        """Read the file of published facts."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def duration_s(self, peak: int) -> float:
        """Return for how long requests arrive."""
        return float(REQUESTS / sum(self.workloads[peak]["rates_rps"].values()))

    def requests(self, peak: int, seed: int) -> list[Request]:
        """Draw the requests: each model's number is its rate, at times without pattern; lengths are exponential, cut at
        `LONGEST`, with the means of its published runs."""
        draws = random.Random(seed)
        drawn: list[Request] = []
        for name, rate in self.workloads[peak]["rates_rps"].items():
            prompt, output = (_scale_of(mean) for mean in MEAN_TOKENS[_number(name)])
            for _ in range(round(rate * self.duration_s(peak))):
                arrival_ms = 1000.0 * draws.uniform(0.0, self.duration_s(peak))
                drawn.append(Request(name, arrival_ms, _length(draws, prompt), _length(draws, output)))
        return drawn

    def models(self, peak: int, lengths: tuple[float, float] | None = None) -> list[LanguageModel]:
        """Return the models as a planner sees them: mean lengths of the whole workload unless others are given."""
        workload = self.workloads[peak]
        prompt, output = lengths or (workload["avg_prompt_tokens"], workload["avg_output_tokens"])
        found = []
        for name, rate in workload["rates_rps"].items():
            size = SIZES[self.size_of[name]]
            memory = (size.weights_mib, size.kv_mib_per_token, size.scale)
            host_ms = _HOST_MS_PER_SEQUENCE[self.size_of[name]]
            times = self.times[self.size_of[name]]
            found.append(LanguageModel(name, rate, prompt, output, *memory, times, size.prefill_share, host_ms))
        return found

    def host_ms(self, model: LanguageModel, gpus: int) -> float:
        """Return what each step takes beside the GPU's time and the time for each sequence."""
        return HOST_MS_PER_LAYER[gpus] * SIZES[self.size_of[model.name]].layers

    def alone_ms(self, name: str, prompt_tokens: float, output_tokens: float) -> float:
        """Return how long a request takes alone on whole GPUs, as many as the paper gives a model of its size."""
        size = self.size_of[name]
        times = self.times[size][SIZES[size].gpus_alone]
        return times.prefill_ms(prompt_tokens, 100) + output_tokens * times.decode_ms(1, prompt_tokens, 100)

    def muxserve_units(self, peak: int) -> tuple[Mesh, ...]:
        """Return MuxServe's units."""
        return muxserve.place(self.models(peak, PLANNED_LENGTHS), NODES, GPUS_PER_NODE)

    def spatial_units(self, peak: int) -> tuple[Mesh, ...]:
        """Return the baseline's units: each model on its own GPUs."""
        models = self.models(peak, PLANNED_LENGTHS)
        return tuple(Mesh(SPATIAL_GPUS[_number(model.name)], ((model, 90.0),)) for model in models)

    def gpulet_units(self, peak: int) -> tuple[list[gpulets.Unit], float]:
        """Return units of gpu-lets with shares of their own, and the multiple of the load that they carry."""

        def bound_ms(model: LanguageModel) -> float:
            return SLO_TIMES_ALONE * self.alone_ms(model.name, model.prompt_tokens, model.output_tokens)

        return gpulets.place(self.models(peak), NODES * GPUS_PER_NODE, bound_ms, self.host_ms)

    def served_by_meshes(self, meshes: Sequence[Mesh], requests: Sequence[Request]) -> None:
        """Run the requests on MuxServe's units or the baseline's."""
        for mesh in meshes:
            models = []
            for model, share in mesh.models:
                planned = muxserve.candidate(model, mesh.gpus)
                most = max(MOST_SEQUENCES, 0 if planned is None else planned.batch)
                models.append(self._model(model, mesh.gpus, model.prefill_share, share, most))
            names = {model.name for model in models}
            run(Unit(tuple(models), mesh.kv_mib), [request for request in requests if request.model in names])

    def served_by_gpulets(self, units: Sequence[gpulets.Unit], requests: Sequence[Request]) -> None:
        """Run the requests on gpu-lets: each goes to the replica that has had the fewest for what it carries."""
        given: dict[tuple[str, int], int] = defaultdict(int)
        dealt: dict[int, list[Request]] = defaultdict(list)
        of_model = defaultdict(list)
        for i, unit in enumerate(units):
            for gpulet in unit.gpulets:
                of_model[gpulet.model.name].append((i, gpulet.rate_rps))
        for request in sorted(requests, key=lambda request: request.arrival_ms):
            i, _ = min(of_model[request.model], key=lambda at: ((given[request.model, at[0]] + 1) / at[1], at[0]))
            given[request.model, i] += 1
            dealt[i].append(request)
        for i, unit in enumerate(units):
            alone = len(unit.gpulets) == 1
            models = [
                self._model(
                    g.model, g.gpus, 100.0 if alone else g.model.prefill_share, 100.0 if alone else g.share, 512
                )
                for g in unit.gpulets
            ]
            run(Unit(tuple(models), unit.kv_mib), dealt[i])

    def score(self, peak: int, requests: Sequence[Request]) -> Score:
        """Judge requests that were served."""
        by_name: dict[str, list[Request]] = defaultdict(list)
        for request in requests:
            by_name[request.model].append(request)
        weighted = sum(len(own) ** 2 / max(_ended(r) for r in own) for own in by_name.values()) * 1000.0
        in_time = sum(
            _ended(r) - r.arrival_ms <= SLO_TIMES_ALONE * self.alone_ms(r.model, r.prompt_tokens, r.output_tokens)
            for r in requests
        )
        count = len(requests)
        return Score(
            throughput_rps=weighted / count,
            in_time_rps=in_time / self.duration_s(peak),
            attainment=in_time / count,
            ttft_s=sum((r.first_ms or 0.0) - r.arrival_ms for r in requests) / count / 1000.0,
            tpot_s=sum((_ended(r) - (r.first_ms or 0.0)) / r.output_tokens for r in requests) / count / 1000.0,
        )

    def _model(self, model: LanguageModel, gpus: int, prefill: float, decode: float, most: int) -> Model:
        host = (self.host_ms(model, gpus), model.host_ms_per_sequence)
        return Model(model.name, model.times[gpus], model.kv_mib_per_token, prefill, decode, most, *host)


def mean_of(scores: Sequence[Score]) -> Score:
    """Return the mean of runs."""
    fields = ("throughput_rps", "in_time_rps", "attainment", "ttft_s", "tpot_s")
    return Score(*(sum(getattr(score, name) for score in scores) / len(scores) for name in fields))


def _number(name: str) -> int:
    return int(name.removeprefix("llm-")) - 1


def _ended(request: Request) -> float:
    if request.end_ms is None:
        raise ValueError(f"a request of {request.model} was never served: its unit has no room for it.")
    return request.end_ms


def _scale_of(mean: float) -> float:
    """Return the scale of an exponential that has this mean when it is cut at `LONGEST`."""
    low, high = 1.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * (1 - math.exp(-LONGEST / middle)) < mean else (low, middle)
    return low


def _length(draws: random.Random, scale: float) -> int:
    return max(1, min(LONGEST, round(draws.expovariate(1.0 / scale))))
