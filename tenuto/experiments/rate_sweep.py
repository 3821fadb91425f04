"""Experiments that vary rate and SLO on four GPUs: the thesis' sections 6.3 and A.2.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenuto.experiments.case import Case
from tenuto.experiments.experiment import Settings
from tenuto.experiments.facts import VISION, client_share, thesis_section
from tenuto.experiments.gpu_sweep import QUICK_S, chosen_policies
from tenuto.experiments.published import PUBLISHED

__all__ = ["RateSweep"]

# The thesis does not print how long these runs were; eight seconds are as long as its other experiments' targets.
DURATION_S = 8.0
QUICK_TOTALS = (3000.0, 4000.0, 5000.0)
QUICK_SLO_MS = 250.0


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
        policies = chosen_policies(settings)
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
