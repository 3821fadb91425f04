"""A controller with hands that do at once, or not at all, what it decides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.interface import Apply, MakePlan, ModelSeen, Observation, WantGpus
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.wire.status import LogLine
from tenuto.placement import Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.planner import Proposal, propose
from tenuto.placement.planner.change_cost import ChangeWorth
from tenuto.profiles import Profiles

__all__ = ["Desk", "PlanningDesk"]


class Desk:
    """Feeds looks of steady rates to a controller; `not_ready` and `broken` say which gpu-lets do not come up."""

    def __init__(self, plan: Plan, gpus: Sequence[Gpu], settings: Mapping[str, object] | None = None) -> None:
        self.settings = ControlSettings.model_validate({"mode": "act", "look_s": 1.0, **(settings or {})})
        self.controller = Controller(self.settings, Memory(plan, plan.workload))
        self.gpus = tuple(gpus)
        self.rates = {spec.name: spec.rate_rps for spec in plan.models}
        self.offline: dict[str, int] = {}  # requests without an SLO that wait
        self.lost = dict.fromkeys(self.rates, 0.0)  # part of the requests
        self.ratios: dict[str, dict[str, float]] = {}
        self.not_ready: set[str] = set()
        self.leaving: dict[str, float] = {}  # when GPUs end
        self.broken: dict[str, str] = {}
        self.answer: Proposal | str | None = None  # what the planner says; None: nothing yet
        self.questions: list[MakePlan] = []
        self.applied: list[Apply] = []
        self.entries: list[LogLine] = []
        self.wanted: list[WantGpus] = []
        self.now_s = 0.0

    def look(self, seconds: int = 1) -> None:
        """Let time pass, a look each second."""
        for _ in range(seconds):
            self.now_s += 1.0
            models = {}
            for name, rate in self.rates.items():
                arrived = round(rate * self.now_s) - round(rate * (self.now_s - 1.0))
                bad = round(self.lost.get(name, 0.0) * arrived)
                models[name] = ModelSeen(arrived, arrived - bad, bad, offline=self.offline.get(name, 0))
            here = {gpu.id for gpu in self.gpus}
            ready = frozenset(
                g.id
                for g in self.controller.plan.gpulets
                if g.id not in self.not_ready and g.id not in self.broken and g.gpu in here
            )
            if self.applied:
                ready |= {gpulet.id for gpulet in self.applied[-1].standby}
            seen = Observation(models, ready, self.gpus, self.broken, self.ratios, leaving=self.leaving)
            self.controller.observe(self.now_s, seen)
            self.take()

    def take(self) -> None:
        """Carry out what was decided."""
        for decision in self.controller.take_decisions():
            if isinstance(decision, MakePlan):
                self.questions.append(decision)
                if self.answer is not None:
                    self.controller.planned(self.now_s, decision.number, self.answer)
                    self.take()
            elif isinstance(decision, Apply):
                self.applied.append(decision)
            elif isinstance(decision, WantGpus):
                self.wanted.append(decision)
            else:
                self.entries.append(decision)

    def restart(self) -> None:
        """Let the controller die and come back with what it remembers."""
        memory = Memory.from_data(json.loads(json.dumps(self.controller.memory().to_data())))
        self.controller = Controller(self.settings, memory)

    def kinds(self) -> list[str]:
        """Return the kinds of the log's entries."""
        return [entry.kind for entry in self.entries]

    def text(self, kind: str) -> str:
        """Return the last entry of a kind."""
        return next(entry.text for entry in reversed(self.entries) if entry.kind == kind)


class PlanningDesk(Desk):
    """A desk whose planner plans at once."""

    def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            super().look()
            while self.questions and self.answers():
                asked = self.questions.pop()
                self.controller.planned(self.now_s, asked.number, propose(asked.request, Profiles([])))
                self.take()

    def answers(self) -> bool:
        """Whether the planner answers now."""
        return True

    def hosted(self) -> set[str]:
        """Return the models that the running plan has."""
        return {replica.name for gpulet in self.controller.plan.gpulets for replica in gpulet.models}


def pays(plan: Plan, *, saves: bool = False, wanted: Mapping[str, int] | None = None) -> Proposal:
    """Return a proposal that pays."""
    gained, saved = (0.0, 10.0) if saves else (10.0, 0.0)
    worth = ChangeWorth(True, "a test says so", 100.0, gained, saved_rent=saved, only_saves=saves)
    return Proposal(plan, "planned anew", worth, wanted)
