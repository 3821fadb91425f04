"""The whole job on this machine, without a GPU: profile, plan, serve, send requests, load, judge; then once more on
emulated GPUs.

The quickstart calls the same functions as the single commands. It only chooses rates and SLOs that suit this machine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import ask_directly
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.documents import dump_yaml, write_whole
from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.bench import BenchOptions, BenchResult, run_bench
from tenuto.loadgen.report.run_page import write_report
from tenuto.loadgen.run import Run
from tenuto.loadgen.run_files import describe, write_run_files
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.placement.policy import DEFAULT_POLICY
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.measuring.measure import MeasureRequest, assemble, measure_model
from tenuto.profiles.shipped import default_profiles

IMAGE_MODELS = ("mobilenet_v2", "resnet50")
TEXT_MODEL = "bert"
SENTENCE = "Hold every note for its full value, and never longer."

_BUSY = 0.25  # default: part of the processor for the planned load; the rest is for the server and the clients
_EMULATED_FACTOR = 10.0  # default: factor on the rates for the four emulated GPUs
_BATCH_SIZES = (1, 2, 4)  # default: batch sizes that are profiled

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunSummary:
    """One of the two runs: its title, its plan and its measured figures."""

    title: str
    folder: Path
    plan: Plan
    result: BenchResult
    document: dict[str, Any]


class Quickstart:
    """Runs the steps in order; `folder` receives the profile, the plans and the reports."""

    def __init__(self, folder: Path, *, seconds: float, seed: int, say: Say) -> None:
        self._folder = folder
        self._seconds = seconds
        self._seed = seed
        self._say = say

    def run(self) -> list[RunSummary]:
        """Do all steps. Everything that was started is stopped, also after errors and Ctrl-C.

        Raises:
            EnvironmentFaultError: a step failed on this machine; the message says what to repair.
        """
        profile = self.profile()
        workload = self.workload(profile)
        write_whole(self._folder / "workload.yaml", workload.dump())
        port, proxy_port = unused_port(8000), unused_port(8001)
        on_cpu = self._plan("cpu", workload, Cluster.parse("cpu:1"), Profiles([profile]), port)
        larger = workload.scaled(_EMULATED_FACTOR)
        on_gpus = self._plan("v100", larger, Cluster.parse("v100:4"), Profiles(default_profiles("v100")), port)

        def say(text: str) -> None:
            self._say(f"  {text}")

        with Launcher(progress=say) as launcher:
            launcher.connect(num_gpus=4, address="local")  # a new Ray, never a cluster that others use
            self._say("serve: real models on the processor")
            served = Deployment(plan=on_cpu, port=port, proxy_port=proxy_port)
            begin(launcher, served, "real models", "quickstart", progress=say)
            self.ask(launcher.base_url)
            runs = [self._load("cpu", "cpu", on_cpu, launcher.base_url)]
            self._say(f"serve: the same models on four emulated V100s, {_EMULATED_FACTOR:g} times the rates")
            end_all()
            emulated = served.model_copy(update={"plan": on_gpus, "executor": "emulated"})
            begin(launcher, emulated, "emulated GPUs", "quickstart", progress=say)
            runs.append(self._load("v100", "v100 (emulated)", on_gpus, launcher.base_url))
            self._say("stop: draining")
        return runs

    def profile(self) -> Profile:
        """Measure the three models on the processor and write the profile file."""
        measurements = []
        for name in (*IMAGE_MODELS, TEXT_MODEL):
            self._say(f"profile: {name} on the processor, batch sizes {', '.join(map(str, _BATCH_SIZES))}")
            # Default: of the demonstration.
            measured = measure_model(MeasureRequest(name, device="cpu", batch_sizes=_BATCH_SIZES, budget_s=8.0))
            for point in measured.profile.points:
                self._say(f"  batch {point.batch_size}: {point.latency_ms:.1f} ms")
            measurements.append(measured)
        profile = assemble(measurements, name="quickstart-cpu", command="tenuto quickstart")
        write_whole(self._folder / "profile.yaml", profile.dump())
        return profile

    def workload(self, profile: Profile) -> Workload:
        """Return rates and SLOs that this machine can hold. Each model gets an equal part of the processor, and an SLO
        with time for batches of the other models."""
        alone = {name: model.latency_ms(1) for name, model in profile.models.items()}
        models = []
        for name, latency_ms in alone.items():
            # Default: a batch may wait for a batch of every other model, on a machine that also does other things.
            # Default: of the demonstration: six times all.
            slo_ms = 50.0 * math.ceil((6.0 * sum(alone.values()) + 2.0 * latency_ms) / 50.0)
            rate_rps = float(f"{1000.0 * _BUSY / len(alone) / latency_ms:.2g}")
            models.append(ModelSpec(name=name, rate_rps=rate_rps, slo_ms=slo_ms))
            self._say(f"workload: {name} {rate_rps:g} requests/s within {slo_ms:g} ms")
        return Workload(models=tuple(models))

    def _plan(self, name: str, workload: Workload, cluster: Cluster, profiles: Profiles, port: int) -> Plan:
        plan = solve(load_policy(DEFAULT_POLICY), workload, cluster, profiles)
        if plan.unserved:
            raise EnvironmentFaultError(
                f"no plan for {', '.join(plan.unserved)}: {plan.unserved_reasons}. Free the machine and retry."
            )
        path = self._folder / f"plan-{name}.yaml"
        write_whole(path, dump_yaml(Deployment(plan=plan, port=port).config().to_data()))
        hosted = "; ".join(f"{g.id}: " + ", ".join(f"{r.name} ≤{r.batch_size}" for r in g.models) for g in plan.gpulets)
        self._say(f"plan: {name}: {hosted}")
        return plan

    def ask(self, url: str) -> None:
        """Send one real photograph and one real sentence, and print the answers."""
        photo = resources.files("tenuto.deployments").joinpath("data", "grace_hopper.jpg").read_bytes()
        for model, body, kind in (
            *((model, photo, "image/jpeg") for model in IMAGE_MODELS),
            (TEXT_MODEL, SENTENCE.encode(), "text/plain"),
        ):
            headers = {"Content-Type": kind, "X-SLO-Ms": "20000"}
            status, content = ask_directly(f"{url}/predict/{model}", 30.0, body, headers)  # limit: for the answer
            answer = json.loads(content)
            if "predictions" not in answer:
                raise EnvironmentFaultError(f"{model} answered {status}: {answer}. Free the machine and retry.")
            best, parameters = answer["predictions"][0], answer["parameters"]
            sent = "photograph" if kind.startswith("image") else f"{SENTENCE!r}"
            self._say(
                f"ask: {model}: {sent} -> {best['label']!r} (random weights, so any label), "
                f"waited {parameters['queue_ms']:.0f} ms, ran {parameters['execution_ms']:.0f} ms "
                f"on {parameters['gpulet']}"
            )

    def _load(self, name: str, title: str, plan: Plan, url: str) -> RunSummary:
        self._say(f"load: {plan.expected.goodput_rps:g} requests/s for {self._seconds:g} s, open loop, Ray actors")
        options = BenchOptions(url, self._seconds, self._seed)
        result = run_bench(plan.models, options, lambda line: self._say(f"  {line}"))
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        document = describe(result, options, plan, command=["tenuto", "quickstart"])
        write_run_files(folder, document, result.records, result.schedule, result.queued)
        write_report(folder, Run(document, result.records, plan))
        return RunSummary(title, folder, plan, result, document)


def default_folder() -> Path:
    """Return a new folder below `reports/` named after the time."""
    return Path("reports") / time.strftime("quickstart-%Y%m%d-%H%M%S")
