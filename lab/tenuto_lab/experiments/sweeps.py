"""Which points the thesis' experiments have: the number of GPUs varied at fixed rates (sections 6.2.1, 6.2.2, A.2.1,
A.2.2), or the rate on fixed GPUs (6.3, A.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tenuto.placement import policy_names
from tenuto_lab.experiments.case import Case
from tenuto_lab.experiments.experiment import THESIS_POLICIES, Settings
from tenuto_lab.experiments.facts import VISION, client_share, thesis_section
from tenuto_lab.experiments.published import PUBLISHED

QUICK_S = 5.0
# The thesis does not print how long these runs were; eight seconds are as long as its other experiments' targets.
DURATION_S = 8.0
QUICK_TOTALS = (3000.0, 4000.0, 5000.0)
QUICK_SLO_MS = 250.0


def gpu_sweep(section: str, **changes: Any) -> Callable[[Settings], list[Case]]:
    """Return a function that makes the points of an experiment with the same rate for every model, on one to many GPUs.

    Args:
        section: whose plans, rates and clients hold.
        changes: of the section's facts; `like` names another section whose facts it has (A.2.1 is section 6.2.1 without
            shares), `options` are those of policies that differ from the default.
    """
    facts = {
        "quick_gpus": (3, 4, 6),
        "clients_like": section,
        "options": {},
        **thesis_section(changes.pop("like", section)),
        **changes,
    }
    models, rate_rps = tuple(facts["models"]), float(facts["target_rps"])

    def cases(settings: Settings) -> list[Case]:
        sent = client_share(facts["clients_like"], rate_rps * len(models)) if settings.clients == "thesis" else 1.0
        whole_s = int(facts["requests_per_model"]) / (rate_rps * sent)
        duration_s = settings.duration_s or (QUICK_S if settings.quick else whole_s)

        def case(policy: str, slo_ms: float, gpus: float, published: str | None) -> Case:
            return Case(
                policy,
                models,
                (rate_rps,) * len(models),
                slo_ms,
                int(gpus),
                int(gpus),
                sent,
                duration_s,
                settings.seed,
                facts["options"].get(policy, {}),
                published,
            )

        counts = facts["quick_gpus"] if settings.quick else facts["gpus"]
        return _cases(section, settings, [(float(facts["slo_ms"]), gpus) for gpus in counts], case)

    return cases


def rate_sweep(section: str, **changes: Any) -> Callable[[Settings], list[Case]]:
    """Return a function that makes the points of an experiment with total rates under several SLOs; `changes` are those
    of section 6.3.

    `vision_part` is the part of the total for vision models; without it all have equal rates.
    """
    facts = {**thesis_section("6.3"), **changes}
    models = tuple(facts["models"])

    def cases(settings: Settings) -> list[Case]:
        duration_s = settings.duration_s or (QUICK_S if settings.quick else DURATION_S)

        def case(policy: str, slo_ms: float, total: float, published: str | None) -> Case:
            sent = client_share(section, total) if settings.clients == "thesis" else 1.0
            return Case(
                policy,
                models,
                divided(total, models, facts.get("vision_part")),
                slo_ms,
                int(facts["gpus"]),
                total,
                sent,
                duration_s,
                settings.seed,
                published=published,
            )

        slos = (QUICK_SLO_MS,) if settings.quick else map(float, facts["slo_ms"])
        totals = QUICK_TOTALS if settings.quick else tuple(map(float, facts["total_rps"]))
        return _cases(section, settings, [(slo, total) for slo in slos for total in totals], case)

    return cases


def divided(total_rps: float, models: Sequence[str], vision_part: float | None = None) -> tuple[float, ...]:
    """Return the rate of each model: equal ones, or equal ones among vision models, which get a part, and others."""
    if vision_part is None:
        return (total_rps / len(models),) * len(models)
    vision = sum(name in VISION for name in models)
    each, other = total_rps * vision_part / vision, total_rps * (1.0 - vision_part) / (len(models) - vision)
    return tuple(each if name in VISION else other for name in models)


def _cases(
    section: str,
    settings: Settings,
    points: Iterable[tuple[float, float]],
    case: Callable[[str, float, float, str | None], Case],
) -> list[Case]:
    """Return every point (SLO, x), the thesis' policies first, and last the section's published plans."""
    policies = settings.policies
    if policies is None:
        others = () if settings.quick else (name for name in policy_names() if name not in THESIS_POLICIES)
        policies = (*THESIS_POLICIES, *others)
    points = list(points)
    published = {n: plan for n, plan in PUBLISHED.items() if plan.section == section and plan.policy in policies}
    return [case(policy, slo_ms, x, None) for policy in policies for slo_ms, x in points] + [
        case(plan.policy, plan.slo_ms, plan.x, name) for name, plan in published.items()
    ]
