"""MuxServe's experiment in virtual time: 16 LLaMAs on four nodes of 8 A100s, at five peaks.

The models are placed in three ways: by MuxServe, by its spatial baseline (each model on GPUs of its own), and on
gpu-lets with shares of their own. All three run with the fitted step times, so on the same model of the GPU, and with
the same host times.

Some facts are not in the paper, and are taken as numbers from the logs of its artefact: the mean lengths of each
model's requests, the longest output, the GPUs of the baseline, the scheduler's time for each sequence.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.documents import load_document
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.components import connected_components
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Generation, ModelProfile, Profile, Profiles, StepsAt
from tenuto_lab.generation import muxserve
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
"""fitted on the published spatial run at peak 8: the time of a step beside the fitted one, by GPUs. No other peak and
no other policy went into it. Without it the TPOT of lightly loaded models comes out a quarter to a third too low."""
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
    """The figures of a run: the mean of the models' throughputs in requests/s, weighted by their requests, as in the
    paper; requests in time per second of arrivals, and as a part of all; mean TTFT and TPOT in s."""

    throughput_rps: float
    in_time_rps: float
    attainment: float
    ttft_s: float
    tpot_s: float


PLANNED_PART = 5 / 8
"""fitted on seed 1 of MuxServe's experiment: the part of an SLO that decoding may take in plans; the rest is for the
first token."""
_SHARES = (100.0, 30.0)
"""derived: step times are linear in 1/share, so that the smallest measured share and the whole GPU fix them."""
_KIND = "a100-80gb"


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
        return cls(load_document(path))

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

    def gpulet_plan(self, peak: int) -> Plan:
        """Return the plan of policy `tenuto`: models with the mean lengths of the whole workload, and an SLO of two
        bounds that together are the experiment's for a request of mean lengths."""
        workload = self.workloads[peak]
        prompt, output = (workload[key] for key in ("avg_prompt_tokens", "avg_output_tokens"))
        models = []
        for name, rate in workload["rates_rps"].items():
            size = self.size_of[name]
            times = self.times[size][SIZES[size].gpus_alone]
            decoding_ms = times.decode_ms(1, prompt, 100)
            reserve_ms = (1.0 - PLANNED_PART) * output * decoding_ms
            models.append(
                ModelSpec.model_validate(
                    {
                        "name": name,
                        "profile": size,
                        "rate_rps": rate,
                        "slo": {
                            "ttft_ms": SLO_TIMES_ALONE * (times.prefill_ms(prompt, 100) + reserve_ms),
                            "tpot_ms": SLO_TIMES_ALONE * PLANNED_PART * decoding_ms,
                        },
                        "generates": {
                            "prompt_tokens": _quantiles(prompt),
                            "output_tokens": _quantiles(output),
                            "max_sequences": MOST_SEQUENCES,
                        },
                    }
                )
            )
        node = [{"type": _KIND, "count": GPUS_PER_NODE}]
        cluster = Cluster.model_validate({"nodes": [{"name": f"n{i}", "gpus": node} for i in range(NODES)]})
        return solve(TenutoPolicy(), Workload(models=tuple(models)), cluster, Profiles([self._profile()]))

    def _profile(self) -> Profile:
        """Return the fitted step times with the host's."""
        rows = {}
        for size, by_gpus in self.times.items():
            facts, each_ms = SIZES[size], _HOST_MS_PER_SEQUENCE[size]
            steps = []
            for gpus, times in by_gpus.items():
                host_ms = HOST_MS_PER_LAYER[gpus] * facts.layers
                for share in _SHARES:
                    prefill = tuple((n, times.prefill_ms(n, share) + host_ms) for n, _, _ in times.prefill.knots)
                    decode = tuple(
                        (n, times.decode_ms(n, 0, share) + host_ms + each_ms * n) for n, _, _ in times.decode.knots
                    )
                    token_ms = times.decode_ms(1, 1, share) - times.decode_ms(1, 0, share)
                    at = {"prefill_ms": prefill, "decode_ms": decode, "context_token_ms": max(0.0, token_ms)}
                    steps.append(StepsAt.model_validate({**at, "share_pct": share, "tensor_parallel": gpus}))
            generation = Generation(kv_bytes_per_token=facts.kv_mib_per_token * 2**20, steps=tuple(steps))
            rows[size] = ModelProfile(weights_mib=facts.weights_mib, generation=generation)
        context = {"context_mib": muxserve.RUNTIME_MIB}
        return Profile(name="muxserve", gpu_type=_KIND, source="fitted here", models=rows, coefficients=context)

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

    def served_by_gpulets(self, plan: Plan, requests: Sequence[Request]) -> None:
        """Run the requests on the gpu-lets of a plan: each goes to the replica of its model that has had the fewest.
        Gpu-lets that share GPUs, directly or through others, disturb each other."""
        given: dict[str, int] = defaultdict(int)
        dealt: dict[str, list[Request]] = defaultdict(list)
        for request in sorted(requests, key=lambda request: request.arrival_ms):
            hosts = plan.hosts_of(request.model)
            if not hosts:
                continue
            request.at = min((gpulet.id for gpulet in hosts), key=lambda name: (given[name], name))
            given[request.at] += 1
            dealt[request.at].append(request)
        specs = {model.name: model for model in self.models(min(self.workloads))}
        for together in connected_components(gpulet.gpus for gpulet in plan.gpulets):
            number = {gpu: place for place, gpu in enumerate(sorted(together))}
            models, mine = [], list[Request]()
            for gpulet in plan.gpulets:
                if not together.issuperset(gpulet.gpus):
                    continue
                (replica,) = gpulet.models
                spec, share = specs[replica.name], gpulet.effective_share_pct
                kv_mib = (replica.kv_tokens or 0) * spec.kv_mib_per_token
                base = self._model(spec, len(gpulet.gpus), share, share, MOST_SEQUENCES)
                on = frozenset(number[gpu] for gpu in gpulet.gpus)
                models.append(replace(base, name=gpulet.id, on=on, kv_mib=kv_mib))
                mine += dealt[gpulet.id]
            run(Unit(tuple(models), 0.0), mine)

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


def _quantiles(mean: float) -> dict[str, dict[int, float]]:
    """Return lengths that are exponential, cut at `LONGEST`, with a mean."""
    scale = _scale_of(mean)
    lengths = {percent: -scale * math.log(1.0 - percent / 100.0) for percent in range(0, 100, 2)}
    return {"quantiles": {p: max(1.0, min(LONGEST, n)) for p, n in lengths.items()} | {100: float(LONGEST)}}


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
