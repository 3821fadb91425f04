"""What each ingredient of USHER is worth: goodput on a fixed cluster and GPUs on an elastic one, without it.

The paper's own ablation (OSDI 2024: 24.3 to 51.6 % goodput against variants without one ingredient, 55.7 % against
USHER without merging operators) was measured on a cluster with unpublished requirements and cannot be recomputed; this
prints what the placement alone is expected to give on the thesis profile.

Run: python tests/benchmarks/bench_usher_ablation.py [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

from placement_scenes import machine, mixed_workload, thesis

from tenuto.placement import Cluster, Workload, load_policy

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {}, "CM: no classes": {"classify": False}, "WD: no replication": {"replication": False},
    "S: no sorting": {"sort": False}, "without grouping": {"grouping": False},
    "without batch choice": {"batch_choice": False},
}


def equal_rates(names: str, rate_rps: float, slo_ms: float) -> Workload:
    """Return a workload of models with the same rate and SLO."""
    models = [{"name": name, "rate_rps": rate_rps, "slo_ms": slo_ms} for name in names.split()]
    return Workload.model_validate({"models": models})


SCENES = {
    "thesis 6.2.1, 4 GPUs": (equal_rates("alexnet densenet121 efficientnet_b7 resnet50 vgg19", 500, 200), 4),
    "thesis 6.2.2, 5 GPUs": (equal_rates("resnet50 mobilenet_v2 bert gpt2", 300, 300), 5),
    "20 models, 24 GPUs": (mixed_workload(20, 8_000), 24),
    "20 models, 240 GPUs": (mixed_workload(20, 80_000), 240),
}


def main() -> None:
    """Print goodput (fixed) and GPUs (elastic) per scene, policy and variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the two scenes of the thesis only")
    arguments = parser.parse_args()
    profiles = thesis()
    print(machine("networkx", "tenuto"))
    print(f"{'scene':<22} {'policy':<10} {'variant':<22} {'goodput r/s':>12} {'GPUs, elastic':>14} {'carried':>8}")
    for scene, (workload, gpus) in list(SCENES.items())[: 2 if arguments.quick else None]:
        for name in ("usher", "wao-usher"):
            for variant, options in VARIANTS.items():
                policy = load_policy(name, options)
                fixed = policy.place(workload, Cluster.parse(f"v100:{gpus}"), profiles)
                elastic = policy.place(workload, Cluster.parse("v100:1", elastic=True), profiles)
                used = len({gpulet.gpu for gpulet in elastic.gpulets})
                carried = elastic.expected.goodput_rps / workload.rate_rps
                print(f"{scene:<22} {name:<10} {variant:<22} {fixed.expected.goodput_rps:>12.0f} {used:>14} "
                      f"{carried:>8.1%}", flush=True)


if __name__ == "__main__":
    main()
