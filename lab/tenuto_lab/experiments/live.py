"""Runs an experiment's points on Ray Serve with emulated GPUs, over HTTP, with the clients of `tenuto bench`.

With a time stretch K one machine is enough: every latency, every SLO and the router's wait are K times as long, and
every rate is a K-th. In virtual time that changes nothing. Real overheads are not stretched, so they count a K-th.
Neighbours cost their mean slowdown here. Inputs are one number each, because the thesis' network is not emulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.records import Records
from tenuto.placement import ModelSpec, Plan
from tenuto_lab.experiments.case import ROUTER, Case, mean_slowdowns, run_case
from tenuto_lab.experiments.figures import run_figures
from tenuto_lab.experiments.runner import Finished, Report, run_here

Say = Callable[[str], None]
WAIT_MS = 100.0
_ONE_NUMBER = {
    "inputs": [{"name": "INPUT0", "dtype": "float32", "shape": [1]}],
    "outputs": [{"name": "OUTPUT0", "dtype": "float32", "shape": [1]}],
}
_GRACE = 3.0  # answers are waited for this many SLOs after the last request


def stretched_plan(plan: Plan, stretch: float) -> Plan:
    """Return the emulated plan as it runs live: times K-fold, rates a K-th, neighbours at their mean slowdown."""
    means = mean_slowdowns(plan)
    gpulets = []
    for gpulet in plan.gpulets:
        replicas = []
        for replica in gpulet.models:
            if replica.latency is None:
                continue
            update = {
                "latency": replica.latency.scaled(stretch),
                "latency_ms": None if replica.latency_ms is None else replica.latency_ms * stretch,
                "rate_rps": None if replica.rate_rps is None else replica.rate_rps / stretch,
                "slowdown": means[gpulet.id, replica.name],
            }
            replicas.append(replica.model_copy(update=update))
        cycle = None if gpulet.duty_cycle_ms is None else gpulet.duty_cycle_ms * stretch
        gpulets.append(gpulet.model_copy(update={"models": tuple(replicas), "duty_cycle_ms": cycle}))
    models = tuple(
        spec.model_copy(
            update={"rate_rps": spec.rate_rps / stretch, "slo_ms": spec.slo_ms * stretch, "options": _ONE_NUMBER}
        )
        for spec in plan.models
    )
    return plan.model_copy(update={"gpulets": tuple(gpulets), "models": models})


def run_live(
    cases: Sequence[Case],
    schedulers: Sequence[str],
    *,
    stretch: float,
    report: Report,
    say: Say,
    address: str | None = None,
) -> Finished:
    """Run every case under every scheduler, one after the other on one Ray; Ctrl-C keeps what is finished.

    Raises:
        EnvironmentFaultError: Ray or the endpoint fails; the points before it are lost.
    """
    finished = Finished([], is_whole=False)
    with contextlib.suppress(KeyboardInterrupt), Launcher(progress=say) as launcher:
        launcher.connect(num_gpus=max((case.gpus for case in cases), default=1), address=address)

        def run(case: Case, plan: Plan, scheduler: str) -> dict[str, Any]:
            return _run(launcher, case, plan, scheduler, stretch, say)

        finished = run_here(cases, partial(run_case, schedulers=schedulers, run=run), report)
    return finished


def _run(launcher: Launcher, case: Case, plan: Plan, scheduler: str, stretch: float, say: Say) -> dict[str, Any]:
    live = stretched_plan(plan, stretch)
    options = {"wait_ms": WAIT_MS * stretch} if scheduler == ROUTER else {}
    end_all()
    begin(
        launcher,
        Deployment(plan=live, executor="emulated", scheduler=scheduler, scheduler_options=options),
        "a run",
        "the laboratory",
    )
    served = [spec for spec in live.models if spec.name not in live.unserved]
    bench = BenchOptions(
        launcher.base_url,
        case.duration_s * stretch,
        case.seed,
        case.sent_share,
        grace_s=_GRACE * case.slo_ms * stretch / 1000.0,
    )
    result = run_bench(served, bench, say)
    if result.is_interrupted:
        raise KeyboardInterrupt
    if result.verdict.result == "INVALID":
        say(f"{case.key.replace('|', ' ')}: {'; '.join(result.verdict.reasons)}")
    records = _of_plan(result.records, served, live)
    figures = run_figures(
        live, records, warmup_ms=bench.measured_from_ms, duration_ms=1000.0 * bench.duration_s, stretch=stretch
    )
    window_s = 0.95 * case.duration_s
    for spec in plan.models:
        if spec.name in live.unserved:  # the endpoint does not know it, so no client asked for it
            offered = spec.rate_rps * case.sent_share
            figures["models"][spec.name]["offered_rps"] = offered
            figures["offered_rps"] += offered
            figures["requests"] += round(offered * window_s)
    return {**figures, "verdict": result.verdict.result, "reasons": list(result.verdict.reasons)}


def _of_plan(records: Records, served: Sequence[ModelSpec], plan: Plan) -> Records:
    """Return the records with models numbered as in the plan, which counts unserved ones, too."""
    place = {spec.name: index for index, spec in enumerate(plan.models)}
    to_plan = np.array([place[spec.name] for spec in served], dtype=np.int32)
    return replace(records, model=to_plan[records.model])
