"""`tenuto interference`: measure models beside each other, and fit the interference models of iGniter and gpulet."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from tenuto.cli.common import Number, Numbers, Target, command_line, progress_console, write_file
from tenuto.documents import parse_pairs
from tenuto.errors import InvalidInputError, Problem, TenutoError
from tenuto.mps.gpu_shares import shares_of
from tenuto.profiles import Profile
from tenuto.profiles.measuring.measure import MeasureRequest
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.measuring.telemetry import NvmlTelemetry, Telemetry, first_visible_uuid
from tenuto_lab.interference.co_run_series import KINDS, measure_co_runs


@click.group("interference", short_help="Measure models beside each other, and fit interference models.")
def command() -> None:
    """Measure how much models slow each other down on one device, and fit the models of iGniter and gpulet to it.

    Example: tenuto interference measure resnet50 vgg19 --profile v100.yaml --kinds pairs
    """


@command.command("measure", short_help="Measure models at the same time, for the profile that has them alone.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option(
    "--profile", "profile", required=True, metavar="FILE", help="The profile in which the models were measured alone."
)
@click.option("--kinds", required=True, metavar="KIND,…", help="igniter (alone and two copies), pairs, residents.")
@click.option("--seconds", type=Number(), default=5.0, show_default=True, help="Seconds of each co-run.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--batch-sizes", "sizes", type=Numbers(int), default="1,2,4,8", show_default=True, metavar="N,N…")
@click.option("--shares", type=Numbers(float), default="50,100", show_default=True, metavar="PCT,PCT…")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="K=V",
    help="Model option, the same as when it was measured alone; repeatable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and inputs.")
@click.option("--time-limit-s", type=Number(), metavar="S", help="Start no further co-run after S seconds.")
def _measure(
    models: tuple[str, ...],
    profile: str,
    kinds: str,
    seconds: float,
    device: str,
    sizes: tuple[int, ...],
    shares: tuple[float, ...],
    options: tuple[str, ...],
    seed: int,
    time_limit_s: float | None,
) -> int:
    """Run MODELs at once, one process each, into the `co_runs` of their profile; those that it holds are left out.

    Example: tenuto interference measure resnet50 vgg19 --profile v100.yaml --kinds igniter,pairs --shares 20,50,80,100
    """
    asked = tuple(dict.fromkeys(kind.strip() for kind in kinds.split(",")))
    problems = [
        Problem("--kinds", kind, "is no kind of co-run", f"Kinds: {', '.join(KINDS)}.")
        for kind in asked
        if kind not in KINDS
    ]
    if not seconds > 0:
        problems.append(Problem("--seconds", seconds, "must be above 0", "Give seconds."))
    if problems:
        raise InvalidInputError(problems)
    given = parse_pairs(options)
    requests = [
        MeasureRequest(model, device, sizes, shares, seed=seed, options=given, time_limit_s=time_limit_s)
        for model in models
    ]
    for request in requests:
        request.check()
    writer = ProfileWriter(Path(profile), command=shlex.join(command_line()), resume=True)
    with shares_of(device, needed=True) as of_gpu:
        fault = measure_co_runs(
            requests,
            writer,
            asked,
            seconds=seconds,
            until=None if time_limit_s is None else time.monotonic() + time_limit_s,
            shares=of_gpu,
            telemetry=None if of_gpu is None else _telemetry(),
            say=lambda text: progress_console().print(text, markup=False),
        )
    if isinstance(fault, TenutoError):
        raise fault
    return 130 if fault is not None else 0


def _telemetry() -> Telemetry | None:
    """Return NVML of the first GPU that this process may use. Without NVML, only power and clocks are left out."""
    try:
        return NvmlTelemetry(first_visible_uuid())
    except TenutoError as error:
        progress_console().print(f"no power and clocks: {error}", markup=False)
        return None


@command.command("fit", short_help="Fit the coefficients of interference models from a profile's measurements.")
@click.argument("profile", type=Target(), metavar="PROFILE")
def _fit(profile: str) -> None:
    """Fit iGniter's and gpulet's coefficients from what PROFILE holds, into it; say what is missing for the others.

    Example: tenuto interference fit v100.yaml
    """
    from tenuto_lab.interference.from_profile import fit_coefficients

    fitted = fit_coefficients(Profile.load(profile))
    for note in fitted.notes:
        progress_console().print(note, markup=False)
    write_file(profile, fitted.profile.dump(), option="PROFILE")
