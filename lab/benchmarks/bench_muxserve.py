"""MuxServe's experiment in virtual time: 16 LLaMAs on 32 A100s at five peaks; also its spatial baseline and
policy `tenuto`.

python lab/benchmarks/bench_muxserve.py FACTS.json [--seeds 5] [--first-seed 0] [--plans]

FACTS.json has the cells, rates and results published with MuxServe (ICML 2024).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tenuto_lab.generation.muxserve_experiment import Experiment, Score, mean_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--plans", action="store_true")
    chosen = parser.parse_args()
    experiment = Experiment.load(chosen.facts)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    print(
        f"means of seeds {seeds.start} to {seeds.stop - 1}; in time: within 8 times alone, requests/s of the arrivals\n"
    )
    print(
        f"{'peak':>4s} {'policy':10s} {'throughput':>10s} {'published':>10s} {'off':>7s} {'in time':>8s} {'part':>7s} "
        f"{'TTFT s':>7s} {'TPOT s':>7s} {'of muxserve':>11s}"
    )
    for peak in sorted(experiment.workloads):
        meshes = {"muxserve": experiment.muxserve_units(peak), "spatial": experiment.spatial_units(peak)}
        plan = experiment.gpulet_plan(peak)
        scores: dict[str, list[Score]] = {"muxserve": [], "spatial": [], "tenuto": []}
        for seed in seeds:
            for name, runs in scores.items():
                requests = experiment.requests(peak, seed)
                if name == "tenuto":
                    experiment.served_by_gpulets(plan, requests)
                else:
                    experiment.served_by_meshes(meshes[name], requests)
                runs.append(experiment.score(peak, requests))
        published = dict(zip(("muxserve", "spatial"), experiment.published[peak], strict=True))
        mux = mean_of(scores["muxserve"])
        for name, runs in scores.items():
            score, known = mean_of(runs), published.get(name)
            beside = f"{known:10.2f} {100 * (score.throughput_rps / known - 1):+6.1f}%" if known else " " * 18
            print(
                f"{peak:4d} {name:10s} {score.throughput_rps:10.2f} {beside} {score.in_time_rps:8.1f} "
                f"{100 * score.attainment:6.1f}% {score.ttft_s:7.2f} {score.tpot_s:7.3f} "
                f"{score.in_time_rps / mux.in_time_rps:11.2f}",
                flush=True,
            )
        if chosen.plans:
            for mesh in meshes["muxserve"]:
                print(f"     muxserve  {mesh.gpus} GPUs: {', '.join(f'{m.name} {s:g} %' for m, s in mesh.models)}")
            for gpulet in plan.gpulets:
                print(
                    f"     tenuto    {len(gpulet.gpus)} GPUs from {gpulet.gpu}: {gpulet.models[0].name} "
                    f"{gpulet.effective_share_pct:g} %"
                )
            for note in (*plan.notes, *plan.unserved_reasons.items()):
                print(f"     tenuto    {note}")


if __name__ == "__main__":
    main()
