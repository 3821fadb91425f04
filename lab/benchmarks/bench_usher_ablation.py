"""What each ingredient of USHER gains: goodput on a fixed cluster and GPUs on an elastic one, without it; and what
merging gains at most.

The paper's own ablation (OSDI 2024: 24.3 to 51.6 % goodput against variants without one ingredient, 55.7 % against
USHER without merging operators) was measured on a cluster with unpublished requirements and cannot be recomputed; this
prints what the placement alone is expected to give on the thesis profile.

Run: python lab/benchmarks/bench_usher_ablation.py [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

from placement_scenes import machine, mixed_workload, thesis

from tenuto.placement import Cluster, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "CM: no classes": {"classify": False},
    "WD: no replication": {"replication": False},
    "S: no sorting": {"sort": False},
    "without grouping": {"grouping": False},
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


VISION = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"


def merging() -> None:
    """Print what the ablation M costs: every network served twice, as two fine-tunings of it.

    No merged program of these networks was measured on a GPU, so that it is modelled, as the most that merging can
    gain: a joint batch of both costs what a batch of that size costs one network, as if they shared every operator.
    """
    base = load_shipped("thesis-v100")
    both = {f"{name}+{name}-2": base.models[name] for name in VISION.split()}
    profiles = Profiles([base.model_copy(update={"models": {**base.models, **both}})])
    print(f"{'merging, modelled':<22} {'policy':<10} {'rate':>9} {'merged r/s':>12} {'M: apart':>12} {'programs':>8}")
    for rate_rps, gpus in ((100, 2), (200, 3), (250, 4)):
        models = [
            {"name": name + copy, "profile": name, "source": f"torchvision/{name}", "rate_rps": rate_rps, "slo_ms": 200}
            for name in VISION.split()
            for copy in ("", "-2")
        ]
        for policy in ("usher", "wao-usher"):
            merged, apart = (
                solve(
                    load_policy(policy),
                    Workload.model_validate({"models": models, "merge": merge}),
                    Cluster.parse(f"v100:{gpus}"),
                    profiles,
                )
                for merge in ("auto", "off")
            )
            programs = sum(len(gpulet.merge) for gpulet in merged.gpulets)
            print(
                f"{f'10 models, {gpus} GPUs':<22} {policy:<10} {rate_rps:>9} {merged.expected.goodput_rps:>12.0f} "
                f"{apart.expected.goodput_rps:>12.0f} {programs:>8}",
                flush=True,
            )


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
                print(
                    f"{scene:<22} {name:<10} {variant:<22} {fixed.expected.goodput_rps:>12.0f} {used:>14} "
                    f"{carried:>8.1%}",
                    flush=True,
                )
    merging()


if __name__ == "__main__":
    main()
