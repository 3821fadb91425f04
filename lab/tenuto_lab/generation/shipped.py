"""The shipped step times of language models, made anew from published measurements and closed forms."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.profiles import Generation, ModelProfile, Profile, StepsAt
from tenuto_lab.generation.muxserve_experiment import SIZES
from tenuto_lab.generation.step_times import Cell, Curve, Errors, by_model, fit, left_out

_SHARES = (100.0, 30.0)
"""derived: each knot is linear in 1/share, so that the smallest measured share and the whole GPU fix it."""
_DRAWS, _OUT = 6, 0.15
"""derived: the part of the cells that the judges of the fit keep back, drawn so many times."""
_LONGEST = 2048
"""paper: the longest context of LLaMA and OPT."""
_OPT = {"opt-13b": (12.853, 40, 5120), "opt-66b": (65.717, 64, 9216)}
"""paper (OPT): parameters in billions, layers, width."""
_TYPICAL_CONTEXT = 512
"""derived: tokens of a sequence's context at which a closed form with two slopes over contexts is met exactly."""
_FURTHER = 1000
"""derived: any batch beyond the threshold; it fixes the slope of the last line."""


def muxserve_a100(cells: Sequence[Cell]) -> Profile:
    """Return LLaMA 7B to 65B on 1 to 8 A100s, on shares of 30 to 100 %, fitted to cells."""
    steps: dict[str, list[StepsAt]] = defaultdict(list)
    for (size, gpus), group in by_model(cells).items():
        times = fit(group)
        for share in _SHARES:
            steps[size].append(
                StepsAt(
                    share_pct=share,
                    tensor_parallel=gpus,
                    prefill_ms=_knots(times.prefill, share),
                    decode_ms=_knots(times.decode, share),
                    context_token_ms=_rounded(times.decode.at(1, share, 1.0) - times.decode.at(1, share)),
                )
            )
    models = {}
    for size, at in steps.items():
        facts = SIZES[size]
        found = _judged([cell for cell in cells if cell.model == size])
        models[size] = ModelProfile(
            weights_mib=round(facts.weights_mib),
            generation=Generation(
                kv_bytes_per_token=facts.kv_mib_per_token * 2**20,
                longest_context=_LONGEST,
                steps=tuple(at),
                errors={f"{kind} {name}": value for kind, pair in found.items() for name, value in pair.items()},
            ),
        )
    return Profile(
        name="muxserve-a100",
        gpu_type="a100-80gb",
        source="fitted to step times measured by the authors of MuxServe (Duan et al., ICML 2024, arXiv 2404.02015) on "
        "A100-80GB under CUDA MPS, by lab/benchmarks/bench_step_times.py; the measurements are theirs and not here",
        memory_mib=81920.0,
        doubts=(
            "errors are of 15 % of the cells left out of the fit, in percent, the mean and the 95th of 100",
            "a step with both a prefill and decoding sequences was not measured: it follows from StepCost's rule",
            "time of a scheduler beside the GPU's is not in it; MuxServe's own took 0.1 ms for each sequence of a step",
            "weights are the parameters in 16 bits",
        ),
        models=models,
    )


def distserve_a100(closed_forms: Mapping[str, Any]) -> Profile:
    """Return OPT-13B and 66B on whole A100s, from DistServe's closed forms of its own engine."""
    models = {}
    for row, by_gpus in closed_forms["distserve"].items():
        name = row.split("/")[-1]
        parameters, layers, width = _OPT[name]
        steps, off = [], []
        for gpus, forms in by_gpus.items():
            at, worst = _steps_of(int(gpus), forms)
            steps.append(at)
            off += worst
        models[name] = ModelProfile(
            weights_mib=round(parameters * 2e9 / 2**20),
            generation=Generation(
                kv_bytes_per_token=4.0 * layers * width,
                longest_context=_LONGEST,
                steps=tuple(steps),
                errors={
                    "decode mean": round(100 * float(np.mean(off)), 1),
                    "decode p95": round(100 * float(np.quantile(off, 0.95)), 1),
                },
            ),
        )
    return Profile(
        name="distserve-a100",
        gpu_type="a100-80gb",
        source="DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670): closed forms published with its code, "
        "github.com/LLMServe/DistServe (Apache-2.0)",
        memory_mib=81920.0,
        doubts=(
            "the closed forms of a decoding step have two slopes over the context, by batch; here it is that of small "
            "batches. errors are what this changes, in percent, over batches of 1 to 256 and contexts of 128 to 1,024",
            "weights are the parameters in 16 bits",
        ),
        models=models,
    )


def _steps_of(gpus: int, forms: Mapping[str, Any]) -> tuple[StepsAt, list[float]]:
    a, b, c = forms["prefill"]
    threshold = int(forms["decoding_large_small_bs_threshold"])
    (sa, sb, sc), (la, lb, lc) = forms["decoding_smallbs"], forms["decoding_largebs"]
    more = lc + (lb - sb) * _TYPICAL_CONTEXT
    at = StepsAt(
        tensor_parallel=gpus,
        # A prompt of n tokens has n(n+1)/2 pairs, so that c n^2 are 2c for each pair less c for each token.
        prefill_ms=((1, _rounded(a + b - c)), (_FURTHER, _rounded(a + _FURTHER * (b - c)))),
        decode_ms=(
            *((1, _rounded(sa + sc)), (threshold - 1, _rounded(sa + (threshold - 1) * sc))),
            *((threshold, _rounded(la + threshold * more)), (_FURTHER, _rounded(la + _FURTHER * more))),
        ),
        context_token_ms=_rounded(sb),
        attention_pair_ms=_rounded(2 * c),
    )
    off = []
    for batch in (1, 8, 32, 64, 94, 95, 128, 192, 256):
        for each in (128, 256, 512, 1024):
            first, per_token, per_sequence = (sa, sb, sc) if batch < threshold else (la, lb, lc)
            said = first + per_token * batch * each + per_sequence * batch
            off.append(abs(at.ms(sequences=batch, context_tokens=batch * each) / said - 1.0))
    return at, off


def _judged(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    drawn = [left_out(cells, _draw(cells, seed)) for seed in range(_DRAWS)]
    both = Errors(tuple(e for d in drawn for e in d.prefill), tuple(e for d in drawn for e in d.decode))
    return {
        kind: {"mean": round(100 * float(np.mean(values)), 1), "p95": round(100 * float(np.quantile(values, 0.95)), 1)}
        for kind, values in (("prefill", both.prefill), ("decode", both.decode))
    }


def _draw(cells: Sequence[Cell], seed: int) -> Callable[[Cell], bool]:
    draws = random.Random(seed)
    return {cell for cell in cells if draws.random() < _OUT}.__contains__


def _knots(curve: Curve, share: float) -> tuple[tuple[float, float], ...]:
    return tuple((amount, _rounded(curve.at(amount, share))) for amount, _, _ in curve.knots)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
