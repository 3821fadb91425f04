"""Symphony table 2: goodput of one model on 8 GPUs, Poisson, no network delay; every scheduler on the same arrivals.

python lab/benchmarks/bench_symphony_table2.py [--quick]
"""

from __future__ import annotations

import statistics

from scenes import INCEPTION, RESNET50, arguments, goodput_rps, print_machine, spread, uniform_system

PUBLISHED = {  # staggered bound, paper, the original program on a virtual clock
    "ResNet50": {
        "bound": 5839,
        "symphony": (5264, 5311),
        "clockwork": (1358, None),
        "nexus": (4027, 4057),
        "shepherd": (4445, 4874),
        "eager": (None, 3788),
    },
    "InceptionResNetV2": {
        "bound": 1083,
        "symphony": (926, 947),
        "clockwork": (458, None),
        "nexus": (618, 623),
        "shepherd": (778, 813),
        "eager": (None, 709),
    },
}
VARIANTS = {
    "deferred": ("deferred", {}),
    "deferred not rehearsed": ("deferred", {"rehearse": "false"}),
    "symphony": ("symphony", {}),
    "symphony at target": ("symphony", {"release": "target"}),
    "symphony head-first": ("symphony", {"gather": "head-first"}),
    "eager": ("eager", {}),
    "timeout": ("timeout", {}),
    "clockwork": ("clockwork", {}),
    "nexus": ("nexus", {}),
    "shepherd": ("shepherd", {}),
}


def main() -> None:
    chosen = arguments(__doc__ or "")
    print_machine()
    seeds = range(chosen.seeds or (2 if chosen.quick else 5))
    for model, guess, duration_s in ((RESNET50, 4000.0, 60.0), (INCEPTION, 700.0, 300.0)):
        if chosen.quick:
            duration_s /= 4
        published = PUBLISHED[model[0]]
        bound = published["bound"]
        line = f"alpha {model[1]} ms, beta {model[2]} ms, SLO {model[3]:g} ms"
        print(f"\n{model[0]}: {line}, 8 GPUs; staggered bound {bound} r/s")
        print(f"{'scheduler':24s} {'goodput r/s, mean (range)':>28s} {'of bound':>9s} {'paper':>7s} {'original':>9s}")
        system = uniform_system([model], 8)
        for label, (name, options) in VARIANTS.items():
            rates = [
                goodput_rps(system, name, guess, duration_s=duration_s, seed=seed, options=options) for seed in seeds
            ]
            paper, original = published.get(name, (None, None)) if " " not in label else (None, None)
            part = 100 * statistics.mean(rates) / bound
            print(f"{label:24s} {spread(rates):>28s} {part:8.1f}% {paper or '-':>7} {original or '-':>9}", flush=True)


if __name__ == "__main__":
    main()
