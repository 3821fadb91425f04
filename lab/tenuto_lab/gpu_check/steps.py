"""The steps of `scripts/gpu_check`: the command of each, its time limit, and what it needs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tenuto.profiles.networks.catalogue import CATALOGUE
from tenuto.profiles.networks.model_options import PLAIN

CALLS = {
    "A": "what is there, results beside the processor's, precision and graphs, served end to end",
    "B": "CUDA MPS: attachment, SMs of a share, memory cap, context, streaming, connections",
    "C": "a profile: batches by shares, pairs, fitted interference",
    "D": "occupancy by hardware counters beside the estimate",
    "F": "CUDA MPS: killed clients and a fault; nothing comes after it",
    "E": "everything of the catalogue: some hours, only where it is asked for",
}
"""Groups of steps, in order. Each can be run by itself when the machine is there for a short time only."""

Need = Literal["nothing", "mps", "no mps"]

_TENUTO = ("-c", "from tenuto.cli import main; main()")
_PROFILE = (*_TENUTO, "profile")
_IMPORT = (*_TENUTO, "kernels", "import")
_CO_RUNS = (*_TENUTO, "interference", "measure")
_FIT = (*_TENUTO, "interference", "fit")


@dataclass(frozen=True)
class Step:
    """One command of a check.

    `arguments` are Python's; the command is stopped after `limit_s`; `packages` are those that it imports beyond the
    ones of a profile; `environment` is added to the check's own.
    """

    name: str
    call: str
    arguments: tuple[str, ...]
    limit_s: float
    needs: Need = "nothing"
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def shown(self, python: str) -> str:
        """Return the command as one would type it."""
        settings = "".join(f"{key}={shlex.quote(value)} " for key, value in self.environment.items())
        return settings + shlex.join([python, *self.arguments])


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `options` go to every model; `device` is where streaming and serving are measured."""

    models: tuple[str, ...] = ("resnet50", "bert", "mobilenet_v2")
    batch_sizes: str = "1,8,32"
    shares: str = "20,40,60,80,100"
    budget_s: float = 20.0
    seconds: float = 6.0
    co_run_s: float = 3.0
    variants: str = "auto,eager,plain,compile"
    options: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"


def steps(folder: Path, gpu_type: str, sizes: Sizes, gpu: str | None = None) -> tuple[Step, ...]:
    """Return all steps in order.

    Args:
        folder: of the results.
        gpu_type: in the name of the profile.
        sizes: how much to measure.
        gpu: UUID of the GPU; None is the first.
    """
    out = ("-o", str(folder))
    first, *others = sizes.models
    given = _options(sizes.options)
    plain = _options([f"{key}={_yaml(value)}" for key, value in PLAIN.model_dump(exclude_defaults=True).items()])
    profile = folder / f"profile-{gpu_type}.yaml"
    seconds, on = f"{sizes.seconds:g}", ("--device", sizes.device)

    def program(name: str, *arguments: str) -> tuple[str, ...]:
        return ("-m", f"tenuto_lab.gpu_check.{name}", *arguments, *out)

    def speed(name: str, *options: str) -> Step:
        return Step(
            f"speed-{name}",
            "A",
            (
                *_PROFILE,
                first,
                *_CUDA,
                "--batch-sizes",
                sizes.batch_sizes,
                "--budget-s",
                seconds,
                *options,
                *given,
                "-o",
                str(folder / f"speed-{name}.yaml"),
            ),
            75.0,
        )

    def streaming(name: str, variants: str, *options: str) -> tuple[str, ...]:
        measured = ("-m", "tenuto_lab.gpu_check.streaming", first, "--batch-size", "8", "--seconds", seconds)
        return (*measured, "--variants", variants, *options, *on, *given, "-o", str(folder / f"{name}.json"))

    def connections(number: int) -> Step:
        return Step(
            f"connections-{number}",
            "B",
            streaming(f"connections-{number}", "auto", "--mps"),
            60.0,
            "mps",
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(number)},
        )

    grid = (
        *_PROFILE,
        first,
        *others,
        *_CUDA,
        "--batch-sizes",
        sizes.batch_sizes,
        "--budget-s",
        f"{sizes.budget_s:g}",
        "--resume",
        *given,
        "-o",
        str(profile),
    )
    return (
        Step("inventory", "A", program("inventory", *(() if gpu is None else ("--gpu", gpu))), 60.0),
        Step("same-results", "A", program("same_results", *on), 120.0),
        speed("plain", *plain),
        speed("eager", "--option", "cuda_graphs=false"),
        speed("fast"),
        Step(
            "served",
            "A",
            program("end_to_end", first, "--batch-size", "8", "--seconds", seconds, *on, *given),
            180.0,
            packages=("msgspec",),
        ),
        Step("first-client", "B", program("sharing", "--part", "first"), 150.0),
        Step("sharing", "B", program("sharing", "--part", "shares", "--limit-s", "170"), 240.0, "mps"),
        Step("streaming", "B", streaming("streaming", sizes.variants), 180.0),
        *(connections(number) for number in (2, 4, 8)),
        Step("grid", "C", (*grid, "--shares", sizes.shares, "--time-limit-s", "290"), 330.0, "mps"),
        Step(
            "pairs",
            "C",
            (
                *_CO_RUNS,
                first,
                *others,
                *_CUDA,
                "--batch-sizes",
                sizes.batch_sizes,
                "--shares",
                sizes.shares,
                "--kinds",
                "pairs",
                "--seconds",
                f"{sizes.co_run_s:g}",
                "--time-limit-s",
                "120",
                *given,
                "--profile",
                str(profile),
            ),
            160.0,
            "mps",
        ),
        Step("pairs-fit", "C", (*_FIT, str(profile)), 40.0, "mps"),
        Step("whole-gpu", "C", (*grid, "--shares", "100", "--time-limit-s", "420"), 470.0, "no mps"),
        Step("green-contexts", "C", program("green_contexts", first, "--batch-size", "8", *given), 90.0, "no mps"),
        Step("occupancy", "D", program("occupancy", first, "--batch-size", "8", "--limit-s", "150", *given), 180.0),
        Step(
            "occupancy-import",
            "D",
            (*_IMPORT, first, "--batch-size", "8", "--ncu", str(folder / "ncu.csv"), "--profile", str(profile)),
            60.0,
        ),
        Step("faults", "F", program("sharing", "--part", "faults", "--limit-s", "150"), 220.0, "mps"),
        *_catalogue(profile, given),
    )


_CUDA = ("--device", "cuda")


def _catalogue(profile: Path, given: Sequence[str]) -> list[Step]:
    """Return the thirteen models by all batches and shares, iGniter's configurations, residents and all pairs."""
    names = list(CATALOGUE)
    end = (*given, "--time-limit-s", "540", "--resume", "-o", str(profile))

    def step(name: str, needs: Need, *arguments: str) -> Step:
        return Step(name, "E", (*_PROFILE, *arguments, *_CUDA, *end), 580.0, needs)

    def co_runs(name: str, kind: str, sizes: str, shares: str, *models: str) -> Step:
        what = ("--kinds", kind, "--batch-sizes", sizes, "--shares", shares, "--seconds", "3", "--time-limit-s", "540")
        return Step(name, "E", (*_CO_RUNS, *models, *_CUDA, *what, *given, "--profile", str(profile)), 580.0, "mps")

    grid = ("--batch-sizes", "1,2,4,8,16,32,64,128", "--budget-s", "60")
    return [
        *(step(f"model-{name}", "mps", name, *grid, "--shares", "10,20,30,40,50,60,70,80,90,100") for name in names),
        *(step(f"whole-{name}", "no mps", name, *grid) for name in names),
        *(co_runs(f"igniter-{name}", "igniter", "1,16,32", "10,50,100", name) for name in names),
        co_runs("residents", "residents", "1,16,32", "10,50,100", names[0]),
        *(
            co_runs(f"pair-{one}-{other}", "pairs", "1,16", "20,50,80,100", one, other)
            for index, one in enumerate(names)
            for other in names[index + 1 :]
        ),
        Step("fit", "E", (*_FIT, str(profile)), 580.0, "mps"),
    ]


def _options(pairs: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--option", pair))


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
