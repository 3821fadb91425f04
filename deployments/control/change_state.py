"""Carries out a change to another plan, stage by stage. When the gpu-lets of one stage are ready, the next stage is
applied. Then the new plan is proved, or taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tenuto.deployments.control import journal
from tenuto.deployments.control.change_rate_limit import ChangeRateLimit
from tenuto.deployments.control.change_table import TRANSITIONS, ChangeEvent, Phase
from tenuto.deployments.control.estimates import FOLLOW
from tenuto.deployments.control.interface import Apply, Decision, Observation
from tenuto.deployments.control.remembered import ChangeUnderWay, Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.planner import Durations
from tenuto.placement.planner.change_stages import next_stage
from tenuto.placement.planner.standby import Standby, still_fitting

_FIRST_READY_S = 300.0  # limit: at the first start, a busy machine also starts gateways meanwhile


class ChangeState:
    """Invariant: at most one change at a time, which goes from state to state as `change_table` says. `plan` was
    applied last, `change` is under way, `proving` was made just now, `standby` are the idle processes beside the
    plan, `leaving` are GPUs whose nodes end soon."""

    def __init__(self, settings: ControlSettings, memory: Memory, decide: Callable[[Decision], None]) -> None:
        """Go on from memory; `decide` receives the decisions."""
        self._settings, self._look_s, self._decide = settings.change, settings.look_s, decide
        self._proves = settings.mode != "off"  # takes a change back whose plan loses requests
        self.plan, self.change, self.proving = memory.plan, memory.change, memory.proving
        self.durations = memory.durations or Durations(settings.change.start_s, settings.change.load_s)
        self.rate_limit = ChangeRateLimit(settings.change, memory.changes_s, memory.quiet_until_s, memory.failures)
        self.gpus: tuple[Gpu, ...] = ()
        self.leaving: frozenset[str] = frozenset()
        self.standby: tuple[Standby, ...] = ()
        self._ready: frozenset[str] = frozenset()  # gpu-lets, at the last look

    @property
    def phase(self) -> Phase:
        """The state of the change."""
        if self.change is None:
            return Phase.NONE if self.proving is None else Phase.PROVING
        return Phase.GOING_BACK if self.change.is_rollback else Phase.UNDER_WAY

    def _move(self, event: ChangeEvent, change: ChangeUnderWay | None = None) -> None:
        """Go to the state after an event; raise `ValueError` when the table does not have it. `change`: the one that is
        under way, or to be proved, from then on."""
        phase = TRANSITIONS.after(self.phase, event)
        self.proving = change if phase is Phase.PROVING else None
        self.change = None if phase is Phase.PROVING else change
        assert self.phase is phase, (event, phase)

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs that are present, not drained, and stay."""
        return tuple(gpu for gpu in self.gpus if not is_at(gpu, {*self.plan.drained, *self.leaving}))

    def here(self, plan: Plan, gpulets: Sequence[Gpulet] | None = None) -> Plan:
        """Return a plan with those gpu-lets (default: all of its own) whose GPUs are present."""
        ids = {gpu.id for gpu in self.gpus}
        held = plan.gpulets if gpulets is None else gpulets
        return plan.model_copy(update={"gpulets": tuple(gpulet for gpulet in held if ids.issuperset(gpulet.gpus))})

    def apply(self, plan: Plan, why: str) -> None:
        """Serve this plan from now on. Standby processes that cannot stay beside it end."""
        self.standby = still_fitting(self.standby, plan, self.gpus)
        self.plan = plan
        self._decide(Apply(plan, why, tuple(standby.gpulet for standby in self.standby)))

    def withdraw(self, name: str, why: str) -> None:
        """Send a version no more requests, also during a change; no process is touched."""
        self.plan = _withdrawn(self.plan, name)
        if self.change is not None:
            origin, target, stage = (
                _withdrawn(plan, name) for plan in (self.change.origin, self.change.target, self.change.stage)
            )
            self.change = replace(self.change, origin=origin, target=target, stage=stage)
        self._move(ChangeEvent.WITHDRAWN, self.change)
        self.apply(self.plan, why)

    def begin(
        self, now_s: float, target: Plan, why: str, suffered: Sequence[str], rates_rps: Mapping[str, float]
    ) -> None:
        """Begin a change; `suffered` are the models that already lost too much before it."""
        held = self.plan.gpulets
        if self.change is not None:  # what it starts does not serve yet
            before = {gpulet.id for gpulet in self.change.origin.gpulets} | self._ready
            held = tuple(gpulet for gpulet in held if gpulet.id in before)
        origin, running = self.plan, self.here(self.plan, held)
        self.rate_limit.begun(now_s)
        change = ChangeUnderWay(origin, target, running, now_s, now_s, why, suffered=tuple(suffered))
        self._move(ChangeEvent.BEGUN, change)
        if not _drains_s(change):  # else requests may still wait for a version that was withdrawn lately
            self._step(change, running, rates_rps)

    def take_over(self, now_s: float, target: Plan, why: str, suffered: Sequence[str]) -> None:
        """Begin a change to a plan whose processes all run already, such as standby processes."""
        origin = self.plan
        self.rate_limit.begun(now_s)
        change = ChangeUnderWay(origin, target, target, now_s, now_s, why, suffered=tuple(suffered))
        self._move(ChangeEvent.BEGUN, change)
        self.apply(target, why)

    def lose(self, now_s: float, lost: Sequence[str]) -> None:
        """Handle the loss of GPUs in use. From now on their loss explains lost requests, and an earlier failed change
        does not delay the change that is needed now."""
        self.rate_limit.forgive()
        if self.change is not None:
            self._decide(journal.abandoned(now_s, lost))
        self._move(ChangeEvent.GPU_LOST)

    def look(self, now_s: float, seen: Observation, rates_rps: Mapping[str, float]) -> str | None:
        """Apply the next stage when the gpu-lets of this one are ready; take the change back when they fail. Return why
        going back failed, if it failed."""
        change, self._ready = self.change, seen.ready
        if self.proving is not None and now_s - self.proving.stage_since_s > self._settings.prove_s:
            self._move(ChangeEvent.PROVED)
            self.rate_limit.proved()
        if change is None:
            return None
        waiting = {gpulet.id for gpulet in change.stage.gpulets} - seen.ready
        before = {gpulet.id for gpulet in change.origin.gpulets}
        broken = {name: why for name, why in seen.broken.items() if name in waiting and name not in before}
        lasts_s = now_s - change.stage_since_s
        if broken:
            why = f"gpu-let {', '.join(sorted(broken))} cannot start: {next(iter(broken.values()))}"
            return self.take_back(now_s, change, why, rates_rps)
        drains_s = _drains_s(change)
        if not waiting and lasts_s >= drains_s:
            if not drains_s:
                self._remember_duration(change, lasts_s)
            self._step(replace(change, stage_since_s=now_s), change.stage, rates_rps)
        elif waiting and lasts_s > max(
            self._settings.ready_timeout_s, 0.0 if change.origin.gpulets else _FIRST_READY_S
        ):
            why = f"gpu-let {', '.join(sorted(waiting))} is not ready after {lasts_s:.0f} s"
            return self.take_back(now_s, change, why, rates_rps)
        return None

    def _step(self, change: ChangeUnderWay, now: Plan, rates_rps: Mapping[str, float]) -> None:
        """Apply the next stage of a change from what runs now, or end the change."""
        stage = next_stage(now, change.target, self.gpus, rates_rps)
        if stage is None and self.plan.to_data() == change.target.to_data():
            self._end(change)
            return
        stage = stage or change.target  # all of it runs, except what never came
        is_last = stage is change.target or stage.to_data() == change.target.to_data()
        self._move(ChangeEvent.STAGE_READY, replace(change, stage=stage))
        what = "back to the previous plan" if change.is_rollback else change.why
        self.apply(stage, f"{what}{'' if is_last else ' (a stage of the change)'}")

    def _end(self, change: ChangeUnderWay) -> None:
        now_s = change.stage_since_s
        if change.is_rollback:
            self._move(ChangeEvent.REACHED)
            self._decide(journal.rolled_back(now_s, now_s - change.begun_s))
            return
        self._decide(journal.changed(now_s, change.why, now_s - change.begun_s))
        self._move(ChangeEvent.REACHED, change)
        if not self._proves:
            self._move(ChangeEvent.PROVED)

    def _remember_duration(self, change: ChangeUnderWay, lasts_s: float) -> None:
        if lasts_s <= self._look_s:
            return
        running = {gpulet.id for gpulet in change.origin.gpulets}
        known = self.durations
        if all(gpulet.id in running for gpulet in change.stage.gpulets):
            self.durations = replace(known, load_s=known.load_s + FOLLOW * (lasts_s - known.load_s))
        else:
            self.durations = replace(known, start_s=known.start_s + FOLLOW * (lasts_s - known.start_s))

    def take_back(
        self,
        now_s: float,
        change: ChangeUnderWay,
        why: str,
        rates_rps: Mapping[str, float],
        held: Sequence[Gpulet] | None = None,
    ) -> str | None:
        """Go back to the plan before a change. When this change was already going back, or nothing ran before it,
        nothing is left to do: return why.

        Args:
            now_s: the time.
            change: the one under way, or the last one made.
            why: for the record.
            rates_rps: by model.
            held: gpu-lets that serve now; default: those of the previous plan.
        """
        if change.is_rollback or not change.origin.gpulets:
            self._move(ChangeEvent.FAILED if change.is_rollback else ChangeEvent.START_FAILED)
            self._decide(journal.stuck(now_s, why, is_first=not change.is_rollback))
            return why
        self._decide(journal.taken_back(now_s, why, self.rate_limit.failed(now_s)))
        before = {gpulet.id for gpulet in change.origin.gpulets}
        if held is None:
            held = [gpulet for gpulet in change.stage.gpulets if gpulet.id in before]
        now, origin = self.here(change.stage, held), self.here(change.origin)
        back = ChangeUnderWay(change.stage, origin, now, now_s, now_s, why, is_rollback=True)
        self._move(ChangeEvent.FAILED, back)
        self._step(back, now, rates_rps)
        return None


def _drains_s(change: ChangeUnderWay) -> float:
    """Return how long requests may wait, in s, for versions that get no more and leave after this stage."""
    staying = {spec.name for spec in change.target.models}
    leaving = (s.slo_ms for s in change.stage.models if s.name not in staying and s.share_pct == 0.0)
    return max(leaving, default=0.0) / 1000.0


def _withdrawn(plan: Plan, name: str) -> Plan:
    """Return a plan in which only requests that name a version in their URL reach it."""
    models = (s.model_copy(update={"share_pct": 0.0, "shadow": False}) if s.name == name else s for s in plan.models)
    return plan.model_copy(update={"models": tuple(models)})
