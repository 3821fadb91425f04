"""Offline requests without an end beside waves of requests with SLOs: what the latter lose, and what of the idle GPU
time the former get.

A scene is drawn from a seed. Of networks: two to four of the thesis' models on one to four V100, each of which hosts
all; another network, or one of them, is asked offline. Of models that generate: a LLaMA on one or two A100 that its own
offline requests go to, too. Rates are waves (a sine of 60 s, up to twice the mean) at a part of what the GPUs carry.
Each scene runs in virtual time twice, alone and with offline requests, on the same arrivals.

Idle is the time of the GPUs in which nothing runs when the requests with SLOs are alone; offline requests get the time
that batches and steps are longer by them.

Run: python lab/benchmarks/bench_offline.py [--seeds 10] [--first-seed 1] [--loads 0.2,0.4,0.6] [--duration-s 300]
     python lab/benchmarks/bench_offline.py --live --loads 0.4 --duration-s 60 [--first-seed 1]

--live: one scene of two models and a third that is asked offline, on two GPUs, in virtual time and on emulated GPUs,
where a batch file has more lines than can run. It takes twice the duration and a minute, and needs two quiet cores. The
last line is the verdict: the part of the idle time that offline requests get differs by at most five points.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

from bench_offline_kills import begin_batch

from tenuto.batching.core.gathering import usual_batch
from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.control.operations import begin
from tenuto.deployments.operator.window import between
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.loadgen.bench import BenchOptions, run_bench, status_at
from tenuto.loadgen.simulated import SimulatedRun, Simulation
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.generation_capacity import carried
from tenuto.placement.workload import ModelSpec, profile_of
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

NETWORKS = ("alexnet", "bert", "densenet121", "mobilenet_v2", "resnet50", "vgg19")
LOST, GOT = 0.002, 0.85  # what may be lost of all requests, and what of the idle time offline requests should get
KV_TOKENS = 100_000
NETWORK = NetworkDelay()
# Of the scene that is served live: α, β and SLO in ms, its GPUs, lines of its file, and until these are asked.
SERVED = {"small": (5.0, 25.0, 500.0), "large": (10.0, 50.0, 1000.0), "night": (20.0, 40.0, 86_400_000.0)}
GPUS, LINES, SETTLES_S, NEAR = 2, 100_000, 5.0, 0.05


@dataclass(frozen=True)
class Scene:
    """A simulation with the model that is asked offline, and what it is about."""

    simulation: Simulation
    offline: str
    about: str


def waves(rng: random.Random) -> dict[str, Any]:
    return {"process": "diurnal", "options": {"period_s": 60.0, "amplitude": rng.uniform(0.3, 1.0)}}


def networks(seed: int, load: float, duration_s: float) -> Scene:
    """Return a scene of networks, at a part of the load at which usual batches keep all GPUs busy."""
    rng = random.Random(f"offline networks {seed}")
    profile = load_shipped("thesis-v100")
    profiles, names = Profiles([profile]), [name for name in NETWORKS if name in profile.models]
    chosen, gpus = rng.sample(names, rng.choice((2, 3, 4))), rng.choice((1, 2, 4))
    models = []
    for name in chosen:
        spec = ModelSpec.model_validate({"name": name, "rate_rps": 1.0, "slo_ms": 1e4})
        latency = profile_of(spec, "v100", profiles).latency()
        slo_ms = rng.choice((5.0, 10.0, 20.0, 40.0)) * latency.at(1)
        run = [0.0, *(latency.at(size) for size in range(1, 65))]
        size = usual_batch(run, slo_ms)
        rate = load * gpus / len(chosen) * 1000.0 * size / run[size]
        models.append({"name": name, "rate_rps": rate, "slo_ms": slo_ms, "arrival": waves(rng)})
    offline = rng.choice(["night", chosen[0]])
    row = rng.choice(names)
    models.append({"name": "night", "profile": row, "offline": True, "slo_ms": 1000.0})
    cluster = Cluster.parse(f"v100:{gpus}")
    made = Simulation.of_workload(
        Workload.model_validate({"models": models}), cluster, profiles, NETWORK, duration_s=duration_s, seed=seed
    )
    return Scene(made, offline, f"{'+'.join(chosen)} on {gpus}, offline {offline if offline != 'night' else row}")


def generating(seed: int, load: float, duration_s: float) -> Scene:
    """Return a scene of a model that generates, at a part of the load that the planner's closed form gives."""
    rng = random.Random(f"offline steps {seed}")
    row, gpus = rng.choice(("llama-7b", "llama-13b")), rng.choice((1, 2))
    generation = load_shipped("muxserve-a100").models[row].generation
    assert generation is not None
    cost = generation.cost(100.0)
    prompt, output = rng.choice((100, 300, 800)), rng.choice((60, 150, 300))
    lengths = {
        "prompt_tokens": {"lognormal": {"median": prompt, "sigma": 0.8, "most": 4 * prompt}},
        "output_tokens": {"lognormal": {"median": output, "sigma": 0.6, "most": 4 * output}},
    }
    slo = {
        "ttft_ms": rng.choice((3.0, 6.0)) * cost.ms(2 * prompt) + 2.0 * cost.ms(0, 1, prompt),
        "tpot_ms": rng.choice((2.0, 3.0, 5.0)) * cost.ms(0, 1, prompt + output),
    }
    model = {"name": "llm", "rate_rps": 1.0, "slo": slo, "generates": lengths}
    capacity_rps, _ = carried(ModelSpec.model_validate(model), cost, KV_TOKENS)
    rate = load * capacity_rps
    replica = {"name": "llm", "batch_size": 256, "kv_tokens": KV_TOKENS, "steps": cost.model_dump(mode="json")}
    plan = Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": f"g{number}", "type": "a100-80gb"} for number in range(gpus)],
            "gpulets": [{"id": f"g{number}/a", "gpu": f"g{number}", "models": [replica]} for number in range(gpus)],
            "models": [{**model, "rate_rps": rate * gpus, "arrival": waves(rng)}],
        }
    )
    about = f"{row} on {gpus}, {prompt}+{output} tokens, SLO {slo['ttft_ms']:.0f}/{slo['tpot_ms']:.0f} ms"
    return Scene(Simulation.of_plan(plan, NETWORK, duration_s=duration_s, seed=seed), "llm", about)


def idle_and_taken(alone: SimulatedRun, both: SimulatedRun) -> tuple[float, float]:
    """Return the part of the GPUs' time that is idle alone, and which part of that offline requests get."""
    busy = alone.result.gpu_busy_ms()
    whole_ms = len(busy) * 1000.0 * alone.result.window_s
    idle_ms = whole_ms - sum(busy.values())
    taken_ms = sum(both.result.gpu_busy_ms().values()) - sum(both.result.gpu_busy_ms(with_offline=False).values())
    return idle_ms / whole_ms, taken_ms / idle_ms if idle_ms > 0.0 else math.inf


def served_plan(load: float) -> Plan:
    """Return the plan of the scene that is served live, at a part of the load at which usual batches keep all busy."""
    models = []
    for name, (alpha_ms, beta_ms, slo_ms) in SERVED.items():
        run = [0.0, *(alpha_ms * size + beta_ms for size in range(1, 33))]
        size = usual_batch(run, slo_ms)
        rate = load * GPUS / 2 * 1000.0 * size / run[size]
        line = {"alpha_ms": alpha_ms, "beta_ms": beta_ms}
        models.append({"name": name, "rate_rps": rate, "slo_ms": slo_ms, "latency": line})
    models[-1] |= {"rate_rps": 0.001, "offline": True}
    hosted = [{"name": model["name"], "batch_size": 32, "latency": model["latency"]} for model in models]
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": f"n0/{number}", "type": "v100"} for number in range(GPUS)],
            "gpulets": [{"id": f"n0/{n}/a", "gpu": f"n0/{n}", "models": hosted} for n in range(GPUS)],
            "models": models,
        }
    )


def live(load: float, duration_s: float, seed: int) -> bool:
    """Run the scene in virtual time and live, print both, and return whether they are near each other."""
    plan = served_plan(load)
    simulation = Simulation.of_plan(plan, NETWORK, duration_s=duration_s, seed=seed)
    alone, both = (each.run().summary() for each in (simulation, replace(simulation, offline={"night": math.inf})))
    parts = [both["offline"]["part_of_idle"]]
    attained = [(alone["attainment"], both["attainment"])]
    online = [spec for spec in plan.models if not spec.offline]
    with tempfile.TemporaryDirectory() as folder, Launcher(progress=lambda t: print(t, file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=GPUS, address="local")
        settings = {"plan": plan.to_data(), "executor": "emulated", "port": unused_port()}
        deployment = Deployment.model_validate({**settings, "offline": {"path": folder, "under_way": 256}})
        begin(launcher, deployment, "a run", "the laboratory")
        options = BenchOptions(deployment.url, duration_s=duration_s, seed=seed, clients=0)
        without = run_bench(online, options)
        begin_batch(deployment.url, LINES, "/v2/models/night/infer")
        time.sleep(SETTLES_S)
        before, began_s = status_at(deployment.url), time.monotonic()
        beside = run_bench(online, options)
        after, passed_s = status_at(deployment.url), time.monotonic() - began_s
    assert before is not None
    assert after is not None
    figures = between(before, after, passed_s)
    busy = sum(each.utilisation for each in figures.gpulets.values()) / GPUS
    part = 0.0 if figures.offline is None else figures.offline.part
    parts.append(part / (1.0 - busy + part))
    attained.append((without.summary["attainment"], beside.summary["attainment"]))
    for name, (was, now), taken in zip(("virtual time", "live"), attained, parts, strict=True):
        print(
            f"{name}: {100 * was:.2f} % in time alone, {100 * now:.2f} % beside; taken {100 * taken:.1f} % of the idle"
        )
    for reason in (*without.verdict.reasons, *beside.verdict.reasons):
        print(f"note: {reason}")
    return abs(parts[0] - parts[1]) <= NEAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--loads", default="0.2,0.4,0.6")
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--live", action="store_true")
    given = parser.parse_args()
    if given.live:
        is_near = live(float(given.loads.split(",")[0]), given.duration_s, given.first_seed)
        print("GOOD" if is_near else f"NOT GOOD: more than {100 * NEAR:g} points apart")
        raise SystemExit(not is_near)
    for kind in (networks, generating):
        for load in map(float, given.loads.split(",")):
            rows = []
            for seed in range(given.first_seed, given.first_seed + given.seeds):
                scene = kind(seed, load, given.duration_s)
                alone = scene.simulation.run()
                both = replace(scene.simulation, offline={scene.offline: math.inf}).run()
                was, now = (run.summary()["attainment"] for run in (alone, both))
                idle, taken = idle_and_taken(alone, both)
                rows.append((was - now, was, idle, taken))
                shown = (
                    f"{100.0 * was:7.2f} {100.0 * now:7.2f} %, idle {100.0 * idle:5.1f} %, taken {100.0 * taken:6.1f} %"
                )
                print(f"  {kind.__name__} {load:g} {seed}: {shown}; {scene.about}", flush=True)
            served = [row for row in rows if row[1] >= 0.99]
            lost, taken = max(row[0] for row in rows), sorted(row[3] for row in rows)
            lost_served = max([row[0] for row in served], default=0.0)
            print(
                f"{kind.__name__} at {load:g}: lost at most {100.0 * lost:.2f} points ({100.0 * lost_served:.2f} where "
                f"99 % are in time alone), in the mean {100.0 * sum(row[0] for row in rows) / len(rows):.3f}; "
                f"taken at least {100.0 * taken[0]:.1f} %, in the middle {100.0 * taken[len(taken) // 2]:.1f} %; "
                f"{sum(row[0] <= LOST for row in rows)} of {len(rows)} lose at most 0.2 points, "
                f"{sum(row[3] >= GOT for row in rows)} take 85 %",
                flush=True,
            )


if __name__ == "__main__":
    main()
