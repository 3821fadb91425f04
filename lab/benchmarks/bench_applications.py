"""Applications served against virtual time, and what the gateway itself takes of each stage.

gpulet's *game* and *traffic* (`examples/applications`) run on a local Ray with emulated GPUs, by the schedule that
virtual time runs: asked as one request, and walked stage by stage by the client, as was the only way before gateways
ran graphs. First a twentieth of their requests is asked: what these take longer than in virtual time is the machine's
own delay, of which each stage has its part. Virtual time runs without it and with it. A chain of three stages with one
number in and out follows; of each stage's time, what is not execution is the gateway's, the dispatcher's and the
gpu-let's own. What is wanted stands beside each figure. All of it takes six minutes; the cores have to be quiet.

    python lab/benchmarks/bench_applications.py [--seconds 30] [--stretch 1] [--chain-rps 200]
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import model_metadata
from tenuto.deployments.serve.launcher import Launcher
from tenuto.files import parse_yaml
from tenuto.loadgen.bench import BenchOptions, asked_of, run_bench
from tenuto.loadgen.clients.group import LocalClient
from tenuto.loadgen.result_folder import hardware, versions
from tenuto.loadgen.schedule import seed_for
from tenuto.loadgen.senders.http_sender import HttpSender
from tenuto.loadgen.senders.payloads import make_bodies
from tenuto.loadgen.simulated import NO_DELAY, Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto_lab.stage_sender import StageSender

EXAMPLES = Path(__file__).parents[2] / "examples" / "applications"
EXECUTION_MS = 1.0  # of each stage of the chain, whatever the batch
ALONE_S, ALONE_SCALE = 40.0, 0.05  # of the run that shows the machine's own delay
MEDIAN_PCT, POINTS, SHARE_MS = 5.0, 1.0, 1.0  # wanted
Rows = dict[str, dict[str, Any]]  # figures of applications by name


def main() -> int:
    """Print attainment and median of every application, simulated and served, and the times of the chain's stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each run")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor on all times of the examples")
    parser.add_argument("--chain-rps", type=float, default=200.0, help="requests per second of the chain; 0: no chain")
    parser.add_argument("--seed", type=int, default=5, help="of the arrivals")
    arguments = parser.parse_args()
    print(f"{hardware()}\n{versions()}")
    with Launcher() as launcher:
        launcher.connect(num_gpus=3, address="local")
        for name in ("game", "traffic"):
            plan = _planned(_example(name, arguments.stretch))
            options = BenchOptions("", arguments.seconds, arguments.seed, clients=0, grace_s=2.0)
            served = _served(launcher, plan, options, alone=True)
            delay = _own_delay(plan, arguments.seed, served.pop("alone")[name])
            rows = {
                "virtual time": _simulated(plan, NO_DELAY, options),
                f"virtual time, {delay.response_ms:.2f} ms of delay a stage": _simulated(plan, delay, options),
                **served,
            }
            _print_beside(rows)
        if arguments.chain_rps:
            options = BenchOptions("", arguments.seconds, arguments.seed, clients=0, grace_s=2.0)
            plan = _planned(_chain(arguments.chain_rps), 3)
            _print_stages(_served(launcher, plan, options, scheduler="eager"))
    return 0


def _planned(work: Workload, gpus: int = 1) -> Plan:
    return solve(load_policy("symphony"), work, Cluster.parse(f"v100:{gpus}"), Profiles(()))


def _simulated(plan: Plan, delay: NetworkDelay, options: BenchOptions, rate_scale: float = 1.0) -> Rows:
    simulation = Simulation.of_plan(plan, delay, duration_s=options.duration_s, seed=options.seed)
    rows: Rows = simulation.run(rate_scale).summary()["applications"]
    return rows


def _own_delay(plan: Plan, seed: int, served: dict[str, Any]) -> NetworkDelay:
    """Return the delay of each stage with which virtual time takes as long as what was served alone."""
    (application,) = plan.applications
    options = BenchOptions("", ALONE_S, seed)
    alone = _simulated(plan, NO_DELAY, options, ALONE_SCALE)[application.name]
    levels: dict[str, int] = {}  # how many stages end one after the other, by stage
    for stage in application.stages:
        levels[stage.label] = 1 + max((levels[before] for before in stage.after), default=0)
    return NetworkDelay(response_ms=max(0.0, served["p50_ms"] - alone["p50_ms"]) / max(levels.values()))


def _example(name: str, stretch: float) -> Workload:
    """Return an example with all times `stretch` times as long, so that few cores can serve it."""
    data: dict[str, Any] = parse_yaml((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"), name)
    for application in data["applications"]:
        application |= {"rate_rps": application["rate_rps"] / stretch, "slo_ms": application["slo_ms"] * stretch}
        for stage in application["stages"]:
            stage["latency"] = {key: each * stretch for key, each in stage["latency"].items()}
    return Workload.model_validate(data)


def _chain(rate_rps: float) -> Workload:
    names = ("first", "second", "third")
    stages = [
        {
            "model": name,
            "after": [names[place - 1]] if place else [],
            "latency": {"points": dict.fromkeys((1, 2, 4, 8), EXECUTION_MS)},
        }
        for place, name in enumerate(names)
    ]
    application = {"name": "chain", "rate_rps": rate_rps, "slo_ms": 100.0, "stages": stages}
    return Workload.model_validate({"applications": [application]})


def _served(
    launcher: Launcher, plan: Plan, options: BenchOptions, scheduler: str = "deferred", *, alone: bool = False
) -> dict[str, Rows]:
    """Return the figures of a plan that is served: asked as applications, first at a low rate where wanted `alone`, and
    walked by the client."""
    end_all()
    begin(launcher, Deployment(plan=plan, executor="emulated", scheduler=scheduler), "a run", "the laboratory")
    options = BenchOptions(**{**vars(options), "url": launcher.base_url})
    models, applications, _ = asked_of(plan)
    rows = {}
    ways = [("served", None, options), ("walked", LocalClient(partial(_walking, plan)), options)]
    if alone:
        seldom = {"duration_s": ALONE_S, "rate_scale": ALONE_SCALE}
        ways.insert(0, ("alone", None, BenchOptions(**{**vars(options), **seldom})))
    for way, group, options in ways:
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        result = run_bench(models, options, clients=group, applications=applications)
        print(
            f"{way}: {result.verdict.result} {result.verdict.reasons}, load of the machine before: {load}",
            file=sys.stderr,
        )
        rows[way] = result.summary["applications"]
    return rows


def _walking(plan: Plan, url: str, key: str) -> StageSender:
    names = {app.model_name(stage) for app in plan.applications for stage in app.stages}
    bodies = {name: make_bodies(model_metadata(url, name), seed_for(0, "payloads", name)) for name in names}
    return StageSender(HttpSender(url, key), plan.applications, bodies)


def _print_beside(rows: dict[str, Rows]) -> None:
    print("| application | offered | " + " | ".join(f"{way}: in time, median ms" for way in rows) + " |")
    print("|---|---|" + "---|" * len(rows))
    for name in rows["served"]:
        expected = rows["virtual time"][name]
        cells = [f"{100 * way[name]['attainment']:.2f} %, {way[name]['p50_ms']:.1f}" for way in rows.values()]
        print(f"| {name} (SLO {expected['slo_ms']:g}) | {expected['offered']} | {' | '.join(cells)} |")
        served = rows["served"][name]
        for way in [way for way in rows if way.startswith("virtual time")]:
            later_pct = 100.0 * (served["p50_ms"] / rows[way][name]["p50_ms"] - 1.0)
            points = 100.0 * (served["attainment"] - rows[way][name]["attainment"])
            wanted = f"(wanted: within {MEDIAN_PCT:g} %), attainment {points:+.2f} points (wanted: within {POINTS:g})"
            print(f"{name} served: median {later_pct:+.1f} % beside {way} {wanted}")


def _print_stages(rows: dict[str, Rows]) -> None:
    print(
        f"| stage | median ms | beyond its execution of {EXECUTION_MS:g} ms (wanted: at most {SHARE_MS:g} ms, served) |"
    )
    print("|---|---|---|")
    for way, figures in rows.items():
        row = figures["chain"]
        for label, stage in row["stages"].items():
            print(f"| {way}: {label} | {stage['p50_ms']:.2f} | {stage['p50_ms'] - EXECUTION_MS:.2f} |")
        whole = row["p50_ms"]
        print(f"| {way}: all of it | {whole:.2f} | {whole - len(row['stages']) * EXECUTION_MS:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
