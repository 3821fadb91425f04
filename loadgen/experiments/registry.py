"""The experiments by name; every figure of the thesis that an experiment covers is a name for it."""

from __future__ import annotations

import difflib

from tenuto.errors import InvalidInputError, Problem
from tenuto.loadgen.experiments.experiment import Detail, Experiment
from tenuto.loadgen.experiments.observed_rates import check_rates
from tenuto.loadgen.experiments.rate_sweep import RateSweep

__all__ = ["EXPERIMENTS", "find_experiments"]

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        figures=("6.15",),
        section="6.3",
        title="Goodput against the request rate, on four GPUs, under three SLOs",
        about="Five vision models share 1,000 to 5,000 requests per second equally.",
        x_label="total target rate, r/s",
        cases=RateSweep.of("6.3").cases,
        check=check_rates,
        details=(
            Detail("wsm-milp", 3000, 250.0, "WSM-MILP at 3,000 r/s"),
            Detail("wsm-milp", 4000, 250.0, "WSM-MILP at 4,000 r/s: vgg19 at batch 128"),
            Detail("wsm-milp", 5000, 250.0, "WSM-MILP at 5,000 r/s"),
            Detail("ao-milp (published plan)", 3000, 250.0, "AO-MILP at 3,000 r/s with densenet121 at target 64"),
            Detail("ao-milp", 5000, 250.0, "AO-MILP at 5,000 r/s with densenet121 at target 64"),
        ),
    ),
)


def find_experiments(names: tuple[str, ...]) -> list[Experiment]:
    """Return the experiments of these figures, each once; `all` gives every one.

    Raises:
        InvalidInputError: an unknown name; the message lists the known ones.
    """
    found: list[Experiment] = []
    problems = []
    by_name = {figure.lower(): experiment for experiment in EXPERIMENTS for figure in experiment.figures}
    for name in names:
        plain = name.lower().removeprefix("figure").removeprefix("fig").lstrip(".-_ ")
        if plain == "all":
            found += [experiment for experiment in EXPERIMENTS if experiment not in found]
        elif plain in by_name:
            found += [by_name[plain]] if by_name[plain] not in found else []
        else:
            close = difflib.get_close_matches(plain, by_name, n=1)
            hint = f"Did you mean '{close[0]}'? " if close else ""
            known = ", ".join(experiment.name for experiment in EXPERIMENTS)
            problems.append(Problem("NAME", name, "no such experiment", f"{hint}Experiments: all, {known}."))
    if problems:
        raise InvalidInputError(problems)
    return found
