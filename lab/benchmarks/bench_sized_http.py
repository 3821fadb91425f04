"""Goodput over HTTP of a text encoder whose requests vary in length, on the CPU: joining beside its rivals.

The encoder has the shape of all-MiniLM-L6 (six layers of 384, random weights) and half of the cores; lengths are
lognormal (median 40 tokens, sigma 0.8, at most 256), arrivals Poisson, the SLO is 5 times l(1, 40).

    python lab/benchmarks/bench_sized_http.py [--quick] [--seconds 20] [--seed 1]

* `joining`: the profile's size classes, measured at 16 to 256 tokens, padded together by the scheduler. * `one length`:
each request comes padded to 256 tokens. * `padded in the batch`: one class of 256 tokens in the plan, requests of their
own length, which the runner pads to the longest of the batch. * `equal shapes`: eager batches that run by groups of
equal length, without padding. * `one by one`: no batches, each request at its own length.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from serving import heading

from tenuto.cli import main as run_verb
from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.generates import Lengths
from tenuto.placement.workload import size_parts
from tenuto.profiles import ModelProfile, Profile
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.networks.text_networks import prepare_transformers

PORT = 8793
MOST, MEDIAN, SIGMA = 256, 40, 0.8
MEASURED, BATCHES = (16, 24, 40, 64, 96, 160, MOST), (1, 2, 4, 8)
SHARE_PCT = 50.0  # of the cores, so that server and clients have the others
HIDDEN, LAYERS, HEADS, VOCABULARY = 384, 6, 12, 30_522
LENGTHS = {"lognormal": {"median": MEDIAN, "sigma": SIGMA, "most": MOST}}


class Encoder(torch.nn.Module):
    """BERT, and the mean over the tokens that are no padding."""

    def __init__(self) -> None:
        prepare_transformers()
        from transformers import BertConfig, BertModel

        super().__init__()
        sides = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "vocab_size": VOCABULARY}
        config = BertConfig(**sides, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        mean: torch.Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return mean


def encoder(*, padded: bool = True) -> LoadedModel:
    """Return the model. Without `padded`, only requests of equal length share a run."""
    torch.manual_seed(0)
    pad = 0.0 if padded else None
    inputs = (
        TensorSignature("input_ids", "int64", ("tokens",), below=VOCABULARY, pad=pad),
        TensorSignature("attention_mask", "int64", ("tokens",), below=2, pad=pad),
    )
    outputs = (TensorSignature("embedding", "float32", (HIDDEN,)),)
    return LoadedModel(Encoder().eval(), ModelSignature("tensor", inputs, outputs, sizes={"tokens": SizeRange(MOST)}))


@dataclass(frozen=True)
class Contestant:
    """How requests are batched: by which classes (none: the profile's), in which batches, under which scheduler, and
    what clients send."""

    name: str
    classes: Sequence[int] = ()
    batches: Sequence[int] = BATCHES
    scheduler: str = "deferred"
    padded: bool = True
    sent: Any = None  # sizes that clients send, if not LENGTHS


CONTESTANTS = (
    Contestant("joining"),
    Contestant("one length", (MOST,), sent=MOST),
    Contestant("padded in the batch", (MOST,)),
    Contestant("equal shapes", scheduler="eager", padded=False),
    Contestant("one by one", batches=(1,)),
)


def measure() -> ModelProfile:
    """Return the encoder's profile at all classes."""
    file = Path(tempfile.mkdtemp(prefix="sized-http-")) / "cpu.yaml"
    sizes, batches = (",".join(map(str, values)) for values in (MEASURED, BATCHES))
    asked = ["--sizes", f"tokens={sizes}", "--batch-sizes", batches, "--shares", f"{SHARE_PCT:g}", "--budget-s", "40"]
    try:
        run_verb(
            ["profile", "bench_sized_http:encoder", "--name", "encoder", *asked, "--device", "cpu", "-o", str(file)]
        )
    except SystemExit as ended:
        if ended.code:
            raise
    return Profile.load(file).models["encoder"]


def make_plan(contestant: Contestant, profile: ModelProfile, slo_ms: float) -> Plan:
    """Return a plan with the encoder alone on half a CPU."""
    spec = ModelSpec(
        name="encoder",
        source="bench_sized_http:encoder",
        rate_rps=30.0,
        slo_ms=slo_ms,
        sizes={"tokens": Lengths.model_validate(LENGTHS)},
        options={"padded": contestant.padded},
    )

    def table(points: ModelProfile) -> dict[str, Any]:
        times = {p.batch_size: p.latency_ms for p in points.points}
        return {"points": {size: times[size] for size in contestant.batches}}

    chosen = tuple((size,) for size in contestant.classes) or profile.size_classes
    classes = {sizes: each for sizes, each in profile.by_class.items() if sizes in chosen}
    mean = profile.mean_over(size_parts(spec, ("tokens",), profile.size_classes))
    replica = {
        "name": "encoder",
        "batch_size": max(contestant.batches),
        "pads": contestant.padded,
        "latency": table(mean if len(classes) > 1 else classes[(MOST,)]),
        "by_size": [{"sizes": {"tokens": sizes[0]}, "latency": table(each)} for sizes, each in classes.items()],
    }
    gpulet = {"id": "c/a", "gpu": "c", "share_pct": SHARE_PCT, "models": [replica]}
    gpus = [{"id": "c", "type": "cpu"}]
    models = [spec.model_dump(exclude_defaults=True)]
    return Plan.from_data({"policy": {"name": "benchmark"}, "gpus": gpus, "gpulets": [gpulet], "models": models})


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six seconds a run, two rates")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    seconds, rates = (6.0, given.rates[:2]) if given.quick else (given.seconds, given.rates)
    profile = measure()
    slo_ms = 5.0 * profile.padded_to({"tokens": MEDIAN}).latency_ms(1, SHARE_PCT)
    heading(f"a text encoder over HTTP, {SHARE_PCT:g} % of the cores, SLO {slo_ms:.1f} ms = 5 l(1, {MEDIAN})")
    for sizes, each in profile.by_class.items():
        times = ", ".join(f"l({p.batch_size}) {p.latency_ms:.1f}" for p in each.points)
        print(f"  {sizes[0]:4d} tokens: {times} ms" + (" (interpolated)" * (sizes not in profile.measured_sizes)))
    print(f"  left out: {profile.size_fit}")
    print(f"{'':22s}" + "".join(f"{f'{rate:g} r/s':>18s}" for rate in rates) + "   (in time, goodput r/s)")
    with Launcher() as launcher:
        launcher.connect(num_gpus=1, address="local")
        for contestant in CONTESTANTS:
            plan = make_plan(contestant, profile, slo_ms)
            end_all()
            begin(launcher, Deployment(plan=plan, port=PORT, scheduler=contestant.scheduler), "a run", "the laboratory")
            row = ""
            for rate in rates:
                sent = {"tokens": Lengths.model_validate(contestant.sent or LENGTHS)}
                spec = plan.models[0].model_copy(update={"rate_rps": rate, "sizes": sent})
                options = BenchOptions(launcher.base_url, seconds, given.seed, clients=0, warmup_s=2.0)
                result = run_bench([spec], options)
                mark = "!" if result.verdict.result == "INVALID" or result.errors else " "
                row += f"{100 * result.summary['attainment']:8.1f} % {result.summary['goodput_rps']:6.1f}{mark}"
            print(f"{contestant.name:22s}{row}", flush=True)


if __name__ == "__main__":
    main()
