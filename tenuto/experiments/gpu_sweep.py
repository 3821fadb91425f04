"""Experiments that vary the number of GPUs at a fixed rate: the thesis' sections 6.2.1, 6.2.2, A.2.1 and A.2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.experiments.case import Case
from tenuto.experiments.experiment import THESIS_POLICIES, Settings
from tenuto.experiments.facts import client_share, thesis_section
from tenuto.experiments.published import PUBLISHED
from tenuto.placement import policy_names

__all__ = ["FIVE_MODELS", "GpuSweep", "chosen_policies"]

FIVE_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
QUICK_S = 5.0


def chosen_policies(settings: Settings) -> tuple[str, ...]:
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
        policies = chosen_policies(settings)

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
