"""Which points the thesis' experiments have: the number of GPUs varied at fixed rates (sections 6.2.1, 6.2.2, A.2.1,
A.2.2), or the rate on fixed GPUs (6.3, A.2.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.experiments.case import Case
from tenuto.experiments.experiment import THESIS_POLICIES, Settings
from tenuto.experiments.facts import VISION, client_share, thesis_section
from tenuto.experiments.published import PUBLISHED
from tenuto.placement import policy_names

FIVE_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
QUICK_S = 5.0
# The thesis does not print how long these runs were; eight seconds are as long as its other experiments' targets.
DURATION_S = 8.0
QUICK_TOTALS = (3000.0, 4000.0, 5000.0)
QUICK_SLO_MS = 250.0


def _chosen_policies(settings: Settings) -> tuple[str, ...]:
    """Return the policies to run: the user's, or the thesis' and then every other that is installed."""
    if settings.policies is not None:
        return settings.policies
    if settings.quick:
        return THESIS_POLICIES
    return (*THESIS_POLICIES, *(name for name in policy_names() if name not in THESIS_POLICIES))


@dataclass(frozen=True)
class GpuSweep:
    """The same rate for every model, on one to many GPUs; `options` are those of policies that differ from the default.

    `section` is whose plans, rates and clients hold; A.2.1 is section 6.2.1 without shares.
    """

    section: str
    models: tuple[str, ...]
    rate_rps: float
    slo_ms: float
    gpus: tuple[int, ...]
    requests_per_model: int
    quick_gpus: tuple[int, ...]
    clients_like: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, section: str, **changes: Any) -> GpuSweep:
        """Read the experiment's numbers from the facts."""
        facts = {**thesis_section(changes.pop("like", section)), **changes}
        return cls(
            section=section,
            models=tuple(facts["models"]),
            rate_rps=float(facts["target_rps"]),
            slo_ms=float(facts["slo_ms"]),
            gpus=tuple(facts["gpus"]),
            requests_per_model=int(facts["requests_per_model"]),
            quick_gpus=tuple(facts.get("quick_gpus", (3, 4, 6))),
            clients_like=str(facts.get("clients_like", section)),
            options=facts.get("options", {}),
        )

    def cases(self, settings: Settings) -> list[Case]:
        """Return every point, the thesis' policies first."""
        total = self.rate_rps * len(self.models)
        sent = client_share(self.clients_like, total) if settings.clients == "thesis" else 1.0
        duration_s = settings.duration_s or (
            QUICK_S if settings.quick else self.requests_per_model / (self.rate_rps * sent)
        )
        policies = _chosen_policies(settings)

        def case(policy: str, gpus: int, published: str | None = None) -> Case:
            return Case(
                policy, self.models, (self.rate_rps,) * len(self.models), self.slo_ms, gpus, gpus, sent, duration_s,
                settings.seed, self.options.get(policy, {}), published,
            )  # fmt: skip

        counts = self.quick_gpus if settings.quick else self.gpus
        cases = [case(policy, gpus) for policy in policies for gpus in counts]
        stated = [(name, plan) for name, plan in PUBLISHED.items() if plan.section == self.section]
        cases += [case(plan.policy, int(plan.x), name) for name, plan in stated if plan.policy in policies]
        return cases


@dataclass(frozen=True)
class RateSweep:
    """Total rates under several SLOs. `vision_part` None: equal rates; else the part of the total for vision models."""

    section: str
    models: tuple[str, ...]
    gpus: int
    slos_ms: tuple[float, ...]
    totals_rps: tuple[float, ...]
    vision_part: float | None = None

    @classmethod
    def of(cls, section: str, **changes: Any) -> RateSweep:
        """Read the experiment's numbers from the facts."""
        facts = {**thesis_section("6.3"), **changes}
        return cls(
            section=section,
            models=tuple(facts["models"]),
            gpus=int(facts["gpus"]),
            slos_ms=tuple(float(slo) for slo in facts["slo_ms"]),
            totals_rps=tuple(float(total) for total in facts["total_rps"]),
            vision_part=facts.get("vision_part"),
        )

    def rates(self, total_rps: float) -> tuple[float, ...]:
        """Return the rate of each model."""
        if self.vision_part is None:
            return (total_rps / len(self.models),) * len(self.models)
        vision = sum(name in VISION for name in self.models)
        return tuple(
            total_rps * self.vision_part / vision
            if name in VISION
            else total_rps * (1.0 - self.vision_part) / (len(self.models) - vision)
            for name in self.models
        )

    def cases(self, settings: Settings) -> list[Case]:
        """Return every point, the thesis' policies first."""
        policies = _chosen_policies(settings)
        duration_s = settings.duration_s or (QUICK_S if settings.quick else DURATION_S)

        def case(policy: str, slo_ms: float, total: float, published: str | None = None) -> Case:
            sent = client_share(self.section, total) if settings.clients == "thesis" else 1.0
            return Case(
                policy, self.models, self.rates(total), slo_ms, self.gpus, total, sent, duration_s, settings.seed,
                published=published,
            )  # fmt: skip

        slos = (QUICK_SLO_MS,) if settings.quick else self.slos_ms
        totals = QUICK_TOTALS if settings.quick else self.totals_rps
        cases = [case(policy, slo, total) for policy in policies for slo in slos for total in totals]
        stated = [(name, plan) for name, plan in PUBLISHED.items() if plan.section == self.section]
        cases += [case(plan.policy, plan.slo_ms, plan.x, name) for name, plan in stated if plan.policy in policies]
        return cases
