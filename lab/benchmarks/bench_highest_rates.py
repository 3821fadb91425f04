"""The highest rate of gpulet's scenarios and applications that each policy still accepts, beside the ideal's.

Choi et al. (gpulet), figures 12 and 16: 4 GPUs, scenarios `equal`, `long-only` and `short-skew` and the applications
`game` and `traffic` with all their rates raised together. A policy accepts a factor when, by its own belief, its plan
carries every rate. The latency tables of the paper (RTX 2080 Ti) were never published, so these are V100 figures on the
`igniter-v100` profile with stand-ins, SLO = twice the solo latency at a batch of 32 on the whole GPU:
LeNet alexnet, GoogLeNet and ResNet-50 resnet50, SSD-MobileNet ssd, VGG-16 vgg19.

The factor is bisected to 0.2 %. A policy may refuse a rate and accept a higher one. So six rates up to 10 % above the
result are tried as well.

Run: python lab/benchmarks/bench_highest_rates.py [--gpus 4] [--policies "ideal;gpulet"]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from placement_scenes import machine

from tenuto.batching.virtual.highest_rate import SearchLimits, find_highest_rate
from tenuto.placement import Cluster, Policy, Workload, load_policy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.placement.policies.gpulet.turns import IGNITER, carried, five_models, slo_ms

EXACT = 0.002  # width of the last bracket
ABOVE = (1.01, 1.02, 1.04, 1.06, 1.08, 1.1)
POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "ideal": ("ideal", {}),
    "gpulet": ("gpulet", {}),
    "gpulet+int": ("gpulet", {"interference": "gpulet"}),
    "gpulet, any turn": ("gpulet", {"merge_without_free": "true"}),
    "gpulet+int, any turn": ("gpulet", {"interference": "gpulet", "merge_without_free": "true"}),
    "sbp": ("sbp", {"max_batch": "32"}),
    "self-tuning": ("self-tuning", {}),
    "mps-default": ("mps-default", {}),
    "igniter": ("igniter", {}),
    "gslice": ("gslice", {}),
    "gpulets+": ("gpulets+", {}),
    "ffd": ("ffd", {}),
    "symphony": ("symphony", {}),
}
# paper: gpulet, section 6: what gpulet with interference reaches of the ideal's rate, and SBP's of gpulet's with `game`
STATED = "published, gpulet+int of the ideal: 92.3 % in the mean, traffic lowest with 87.7 %; game 1,502 r/s, sbp 720"


def scenes() -> dict[str, Workload]:
    """Return the scenarios and applications at factor 1."""
    game = [{"model": "alexnet", "count": 6}, {"model": "resnet50"}]
    traffic = [{"model": "ssd"}, *({"model": row, "after": ["ssd"]} for row in ("resnet50", "vgg19"))]

    def application(name: str, slo: float, stages: list[dict[str, object]]) -> Workload:
        return Workload.model_validate(
            {"applications": [{"name": name, "rate_rps": 10.0, "slo_ms": slo, "stages": stages}]}
        )

    return {
        "equal": five_models(alexnet=50, resnet50=50, resnet50_b=50, ssd=50, vgg19=50),
        "long-only": five_models(resnet50_b=100, ssd=100, vgg19=100),
        "short-skew": five_models(alexnet=100, resnet50=100, resnet50_b=100, ssd=50, vgg19=50),
        "game": application("game", slo_ms("resnet50"), game),
        "traffic": application("traffic", slo_ms("ssd"), traffic),
    }


@dataclass(frozen=True)
class Verdict:
    """What a policy says of a factor."""

    is_in_time: bool
    ends_search: str | None = None


def highest(accepts: Callable[[float], bool], first: float = 1.0) -> float:
    """Return the highest accepted factor that was found, 0 where none is."""
    limits = SearchLimits(tolerance=EXACT, start_scale=first)
    found = find_highest_rate(lambda factor: Verdict(accepts(factor)), limits).rate_scale
    above = [found * more for more in ABOVE if found and accepts(found * more)]
    return highest(accepts, above[-1]) if above else found


def main() -> None:
    """Print the highest rates by policy and scene, in requests per second and relative to the ideal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--policies", default=";".join(POLICIES), help="the first is what the others are compared with")
    arguments = parser.parse_args()
    unknown = [label for label in arguments.policies.split(";") if label not in POLICIES]
    if unknown:
        parser.error(f"no such policy here: {unknown[0]}. Known: {'; '.join(POLICIES)}.")
    cluster = Cluster.parse(f"v100:{arguments.gpus}")
    print(machine("tenuto"))
    print(f"{arguments.gpus} V100; {STATED}")
    ideal: dict[str, float] = {}
    for label in arguments.policies.split(";"):
        name, options = POLICIES[label]
        policy, start = load_policy(name, options), time.process_time()
        cells, parts = [], []
        for scene, workload in scenes().items():
            found = highest(lambda factor, p=policy, w=workload: _accepts(p, w.scaled(factor), cluster))
            ideal.setdefault(scene, found)
            requests = sum(a.rate_rps for a in workload.applications) or workload.rate_rps
            cells.append(f"{scene} {found * requests:,.0f} r/s {found / ideal[scene]:.1%}")
            parts.append(found / ideal[scene])
        mean, took = sum(parts) / len(parts), time.process_time() - start
        print(f"  {label:<20} {', '.join(cells)}; mean {mean:.1%} ({took:.1f} s)", flush=True)


def _accepts(policy: Policy, workload: Workload, cluster: Cluster) -> bool:
    return carried(policy.place(workload, cluster, IGNITER), workload)


if __name__ == "__main__":
    main()
