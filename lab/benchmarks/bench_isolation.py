"""One model gets eight times its planned rate: does another model, which keeps to its plan, lose requests by it?

Gold (weight 10) and bronze (weight 1) share gpu-lets; attainment of both when each keeps to its plan and when bronze
sends eight times its own, under every scheduler, Poisson arrivals, 120 s.

    python lab/benchmarks/bench_isolation.py [--quick]
"""

from __future__ import annotations

import numpy as np
from scenes import arguments, poisson, print_machine

from tenuto.batching.core.system import Host, Model, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate

# alpha ms, beta ms, SLO ms, gold's and bronze's planned rates per gpu-let
CASES = ((1.053, 5.072, 50.0, 10.0, 100.0), (5.0, 20.0, 200.0, 10.0, 20.0), (5.0, 20.0, 100.0, 10.0, 15.0))
SCHEDULERS = ("deferred", "symphony", "eager", "clockwork", "shepherd")


def main() -> None:
    """Print attainments in percent, gold / bronze."""
    chosen = arguments(__doc__ or "")
    print_machine()
    seconds = 30.0 if chosen.quick else 120.0
    print(f"{'gpu-lets':>8} {'l(b) ms':>16} {'SLO':>5} {'bronze sends':>13} " + "".join(f"{n:>15}" for n in SCHEDULERS))
    for gpulets in (1, 4):
        for alpha, beta, slo_ms, gold, bronze in CASES:
            steps = (0.0, *(alpha * size + beta for size in range(1, int((slo_ms - beta) / alpha) + 1)))
            hosts = dict.fromkeys((0, 1), Host(steps))
            models = (Model("gold", slo_ms, gold * gpulets, weight=10.0), Model("bronze", slo_ms, bronze * gpulets))
            system = System(models, tuple(ScheduledGpulet(f"g{n}/a", f"g{n}", hosts) for n in range(gpulets)))
            for times_plan in (1, 8):
                rates = [gold * gpulets, bronze * gpulets * times_plan]
                arrivals = poisson(rates, seconds, 5)
                cells = ""
                for name in SCHEDULERS:
                    result = simulate(make_scheduler(name, system), *arrivals, duration_s=seconds)
                    kept = 100.0 * np.asarray(result.attainments())
                    cells += f"{kept[0]:7.1f} /{kept[1]:6.1f}"
                label = f"{alpha:g} b + {beta:g}"
                print(f"{gpulets:8d} {label:>16} {slo_ms:5g} {times_plan:10d} x  {cells}", flush=True)


if __name__ == "__main__":
    main()
