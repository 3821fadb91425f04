"""The experiments by name; every figure of the thesis that an experiment covers is a name for it."""

from __future__ import annotations

import difflib

from tenuto.errors import InvalidInputError, Problem
from tenuto_lab.experiments.experiment import Detail, Experiment
from tenuto_lab.experiments.observed.language import LANGUAGE
from tenuto_lab.experiments.observed.rates import RATES
from tenuto_lab.experiments.observed.vision import VISION
from tenuto_lab.experiments.running_tuner import FIGURES
from tenuto_lab.experiments.sweeps import gpu_sweep, rate_sweep

_GPUS = "GPUs"
_WAO, _AO = "wao-usher", "ao-milp (published plan)"


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        figures=("6.1", "6.2", "6.3", "6.4", "6.5", "6.6", "6.7", "6.8", "6.9"),
        section="6.2.1",
        title="Goodput against the number of GPUs, five vision models",
        about="Five vision models at 500 requests per second each, SLO 200 ms, on one to six GPUs.",
        x_label=_GPUS,
        cases=gpu_sweep("6.2.1", quick_gpus=(2, 3, 4, 5, 6)),
        claims=VISION,
        details=(
            Detail("usher", 3, 200.0, "Usher on three GPUs: efficientnet_b7 at batch 16"),
            Detail("usher", 4, 200.0, "Usher on four GPUs: efficientnet_b7 twice at batch 8"),
            Detail("usher", 6, 200.0, "Usher on six GPUs"),
            Detail(_AO, 6, 200.0, "AO-MILP on six GPUs as published: batch 64"),
            Detail("ao-milp", 6, 200.0, "AO-MILP on six GPUs as our solver chooses"),
            Detail(_WAO, 3, 200.0, "WAO-Usher on three GPUs"),
            Detail("wsm-milp", 4, 200.0, "WSM-MILP on four GPUs"),
            Detail("wsm-milp", 5, 200.0, "WSM-MILP on five GPUs"),
            Detail("igniter (published plan)", 5, 200.0, "iGniter's replicas of efficientnet_b7"),
            Detail("igniter", 5, 200.0, "iGniter on five GPUs, with derived coefficients"),
        ),
    ),
    Experiment(
        figures=("6.10", "6.11", "6.12", "6.13", "6.14"),
        section="6.2.2",
        title="Goodput against the number of GPUs, vision and language models",
        about="resnet50, mobilenet_v2, bert, gpt2 at 300 requests per second each, SLO 300 ms, on one to eight GPUs.",
        x_label=_GPUS,
        cases=gpu_sweep("6.2.2", quick_gpus=(3, 5, 6, 7)),
        claims=LANGUAGE,
        details=(
            Detail(_WAO, 3, 300.0, "WAO-Usher on three GPUs"),
            Detail("usher", 5, 300.0, "Usher on five GPUs"),
            Detail("wsm-milp", 5, 300.0, "WSM-MILP on five GPUs"),
            Detail("wsm-milp", 7, 300.0, "WSM-MILP on seven GPUs"),
        ),
    ),
    Experiment(
        figures=("6.15",),
        section="6.3",
        title="Goodput against the request rate, on four GPUs, under three SLOs",
        about="Five vision models share 1,000 to 5,000 requests per second equally.",
        x_label="total target rate, r/s",
        cases=rate_sweep("6.3"),
        claims=RATES,
        details=(
            Detail("wsm-milp", 3000, 250.0, "WSM-MILP at 3,000 r/s"),
            Detail("wsm-milp", 4000, 250.0, "WSM-MILP at 4,000 r/s: vgg19 at batch 128"),
            Detail("wsm-milp", 5000, 250.0, "WSM-MILP at 5,000 r/s"),
            Detail("ao-milp (published plan)", 3000, 250.0, "AO-MILP at 3,000 r/s with densenet121 at target 64"),
            Detail("ao-milp", 5000, 250.0, "AO-MILP at 5,000 r/s with densenet121 at target 64"),
        ),
    ),
    Experiment(
        figures=("A.1",),
        section="A.2.1",
        title="As figure 6.1, without shares for Usher and WAO-Usher",
        about="Gpu-lets compete freely for their GPU, which is emulated as taking turns in time slices.",
        x_label=_GPUS,
        cases=gpu_sweep(
            "A.2.1",
            like="6.2.1",
            clients_like="6.2.1",
            options={"usher": {"shares": False}, "wao-usher": {"shares": False}},
        ),
        details=(Detail(_WAO, 3, 200.0, "WAO-Usher on three GPUs without shares"),),
    ),
    Experiment(
        figures=("A.2",),
        section="A.2.2",
        title="As figure 6.1, at twice the rate on up to eight GPUs",
        about="Five vision models at 1,000 requests per second each, SLO 200 ms.",
        x_label=_GPUS,
        cases=gpu_sweep(
            "A.2.2", like="6.2.1", target_rps=1000, requests_per_model=8000, gpus=range(1, 9), quick_gpus=(4, 6, 8)
        ),
        details=(
            Detail("usher", 8, 200.0, "Usher on eight GPUs"),
            Detail("wsm-milp", 8, 200.0, "WSM-MILP on eight GPUs"),
        ),
    ),
    Experiment(
        figures=("A.3",),
        section="A.2.3",
        title="As figure 6.15, with language models",
        about="alexnet, mobilenet_v2 and resnet50 together get two thirds of the rate, bert and gpt2 one third.",
        x_label="total target rate, r/s",
        cases=rate_sweep("A.2.3", models=("alexnet", "bert", "gpt2", "mobilenet_v2", "resnet50"), vision_part=2 / 3),
        details=(
            Detail("ao-milp", 3000, 250.0, "AO-MILP at 3,000 r/s"),
            Detail("wsm-milp", 3000, 250.0, "WSM-MILP at 3,000 r/s"),
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
            hint = f"Did you mean '{close[0].upper()}'? " if close else ""
            known = ", ".join([*(experiment.name for experiment in EXPERIMENTS), *FIGURES])
            problems.append(Problem("NAME", name, "no such experiment", f"{hint}Experiments: all, {known}."))
    if problems:
        raise InvalidInputError(problems)
    return found
