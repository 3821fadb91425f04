"""The controller: observations and time go in, decisions with their reasons come out; no I/O, no clock, no randomness.

Read it from `observe` down. Every look goes the same way. First the controller learns (`estimates`). Then it moves a
change under way one step on (`change_state`), or looks for reasons to plan again (overload, a lost GPU, notice of a
spot node that ends, …) and asks (`planner_requests`). A plan comes back through `planned`, and `_decide` makes it a
change if it pays. The running gpu-lets serve all the while. When no plan comes, or it breaks a rule or carries less,
nothing changes. When a plan does not become ready, it is taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tenuto.deployments.control import journal
from tenuto.deployments.control.canaries import Canaries
from tenuto.deployments.control.change_state import ChangeState
from tenuto.deployments.control.estimates import Estimates, EstimateUpdate
from tenuto.deployments.control.gpu_requests import GpuRequests
from tenuto.deployments.control.idle_models import IdleModels
from tenuto.deployments.control.interface import AdvisedPlan, Decision, MakePlan, Observation, WantGpus
from tenuto.deployments.control.journal import Kind, Reason, listed
from tenuto.deployments.control.lengths import as_declared
from tenuto.deployments.control.planner_requests import SAVING, PlannerRequests
from tenuto.deployments.control.rates import Rates
from tenuto.deployments.control.remembered import ChangeUnderWay, Memory
from tenuto.deployments.control.settings import ControlSettings, GpuBounds, Mode
from tenuto.deployments.control.version_edits import as_split, with_models, without
from tenuto.deployments.wire.status import ChangeStatus, ControllerState, LogLine
from tenuto.placement import Gpulet, Plan, Workload
from tenuto.placement.cluster import SPOT, Gpu, node_of
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.plan_edits import on_gpus, with_gpulets, with_idle, without_others
from tenuto.placement.planner import ChangeTerms, PlanRequest, Proposal, RunningPlan
from tenuto.placement.planner.standby import taken_over
from tenuto.placement.versions import shared_out, splits
from tenuto.placement.workload import ModelSpec, lacking


class Controller:
    """Invariant: at most one change and one question to the planner at a time."""

    def __init__(self, settings: ControlSettings, memory: Memory) -> None:
        """Begin, or go on from memory."""
        self._settings = settings
        self.mode: Mode = settings.mode
        self.paused = memory.paused
        self._workload = memory.workload
        self._decisions: list[Decision] = []
        self._estimates = Estimates(settings, memory)
        self._change_state = ChangeState(settings, memory, self._decisions.append)
        planned_rps = {spec.name: spec.rate_rps for spec in memory.plan.models}
        self._questions = PlannerRequests(planned_rps, settings)
        self._reasons: dict[Reason, str] = {}  # why to plan again
        self._checked_s = self._compared_s = -settings.interval_s
        self._compared_losses: tuple[frozenset[str], bool] | None = None  # what loses, and whether an event explains it
        self._now_s = 0.0
        self._gpu_requests = GpuRequests(settings)
        self._idle = [spec for spec in memory.plan.models if spec.name in memory.plan.idle]
        self._idle_models = IdleModels(self._idle)
        self._standby_of: tuple[Gpulet, ...] | None = None  # gpu-lets for which standby processes were asked
        self._edits = dict(memory.edits)
        confidence = settings.canary.confidence
        self._canaries = None if confidence is None else Canaries(confidence)
        self._said: dict[object, float] = {}  # when a line that changes nothing was last noted
        self._ends_soon = False  # a node in use, too soon to wait for room elsewhere
        self.advice: AdvisedPlan | None = None
        # The process before may have ended between an edit and its plan.
        aim = memory.plan if memory.change is None else memory.change.target
        aimed, declared = ({spec.name: spec for spec in each.models} for each in (aim, memory.workload))
        undone = lacking(aim.models, {**dict.fromkeys(aimed), **declared})
        self._set(Reason.WORKLOAD, undone, f"the workload changed ({', '.join(undone)})")

    # --- in -----------------------------------------------------------------------------------------------------------

    def observe(self, now_s: float, seen: Observation) -> None:
        """Take one look."""
        self._now_s = now_s
        news = self._estimates.observe(now_s, seen)
        if seen.leaving or self._change_state.leaving:
            self._notice_leaving(seen.leaving)
        lost = self._notice_gpus(seen.gpus)
        given_up = set(self._gpu_requests.given_up)
        late = self._gpu_requests.give_up_late(now_s, self._present) if self._settings.gpus else {}
        if given_up != self._gpu_requests.given_up.keys():
            self._questions.forget_answer()
        if late:
            self.note(journal.gpus_late(now_s, late, self._settings.change.come_s))
        self._go_on(seen, news)
        if self.mode == "act":
            self._idle = self._idle_models.observe(
                now_s,
                self._workload.models,
                seen.models,
                is_changing=self.change is not None,
                is_prepared=self._questions.out is not None or bool(self._gpu_requests.missing),
            )
        self._judge_canaries(seen)
        if self.change is None and self._change_state.standby:
            self._let_standby_take_over(news, seen.ready, is_news=news.jumped or lost)
        if self.change is None and self.mode != "off":
            self._follow_idle_models()
        if self.change is None and self.mode != "off":
            self._find_reasons(news)
            self._ask()

    def planned(self, now_s: float, number: int, result: Proposal | str) -> None:
        """Take the planner's result, or the reason why it has none."""
        self._now_s = now_s
        request, questions = self._questions.out, self._questions
        if request is None or request.number != number:
            return
        questions.out = None
        is_repeated, questions.is_repeated = questions.is_repeated, False
        if request.gpus != self._change_state.gpus:  # the next look asks again for the same reasons
            questions.forget_answer()
            return
        reasons, self._reasons = self._reasons, {}
        self.advice = None
        if isinstance(result, str):
            if reasons:  # else they have passed meanwhile
                self._mention(journal.no_plan(now_s, reasons, result), result, *reasons)
            return
        result = self._with_declared(result)
        self._keep_on_standby(result, "; ".join(reasons.values()))
        reasons.pop(Reason.STANDBY, None)
        if not reasons:
            return
        if result.needed_gpus is not None:
            self._want_gpus(result.needed_gpus)
        self._decide(result, reasons, now_s - request.since_s, is_repeated=is_repeated)

    def _with_declared(self, result: Proposal) -> Proposal:
        """Return a proposal whose plan has the models as declared, what is idle and drained, and the applications: the
        planner is asked for their models alone."""
        if result.plan is None:
            return result
        models = as_declared(result.plan.models, self._workload.models)
        update = {"models": models, "applications": self._workload.applications, "drained": self.plan.drained}
        plan = result.plan.model_copy(update=update)
        return replace(result, plan=with_idle(plan, self._idle, self._wake_s) if self._idle else plan)

    def _decide(self, result: Proposal, reasons: dict[Reason, str], took_s: float, *, is_repeated: bool) -> None:
        """Begin what the planner proposes, advise it, or note why the running plan stays.

        Args:
            result: the proposal.
            reasons: why it was asked for.
            took_s: how long the planner took.
            is_repeated: its question was asked for the second time, as rates had outgrown the first answer.
        """
        plan, weighed = result.plan, (self._now_s, reasons, result, took_s)
        if plan is None or not result.worth.pays:
            left = self._without_leaving() if self._ends_soon and Reason.LEAVING in reasons else None
            if left is not None and self.mode == "act" and not self.paused:
                self._begin(left, reasons[Reason.LEAVING])
            else:
                self._mention(journal.weighed(Kind.KEPT, *weighed), *reasons)
            return
        waits = Reason.LEAVING in reasons and not self._ends_soon
        if waits and self._short(plan).keys() - self._short(self.plan).keys():
            self._mention(journal.weighed(Kind.KEPT, *weighed, "what leaves serves until there is room, or no time"))
            return
        if not is_repeated and self._is_outgrown(plan):
            self._reasons, self._questions.is_repeated = reasons, True
            self._questions.forget_answer()
            self._ask()
            return
        is_split_alike = splits(plan.models) == splits(self.plan.models)
        if plan.gpulets == self.plan.gpulets and is_split_alike and not self.paused:
            line = journal.weighed(Kind.RATES, *weighed)
            self._mention(line)
            if self.mode == "act":
                self._change_state.apply(plan, line.text)
            return
        is_more = not reasons.keys().isdisjoint({Reason.WORKLOAD, Reason.LEAVING})
        is_saving = result.worth.only_saves and not is_more
        obstacle = self._obstacle(saves_only=is_saving)
        if is_saving and reasons.keys() & {Reason.SLO, Reason.OVERLOAD}:
            obstacle = "GPUs are not given up while requests are lost"
        if obstacle is not None:
            self._questions.forget_answer()  # asked again when nothing stands against it
            advised = journal.weighed(Kind.KEPT, *weighed, obstacle)
            self._mention(advised, *reasons)
        elif self.mode == "act":
            self.note(journal.weighed(Kind.CHANGE, *weighed))
            self._begin(plan, "; ".join(reasons.values()))
            return
        else:
            advised = journal.weighed(Kind.ADVICE, *weighed)
            held = ((g.id, *((replica.name, replica.batch_size) for replica in g.models)) for g in plan.gpulets)
            self._mention(advised, *held)
        self.advice = AdvisedPlan(plan, advised.text)

    def set_workload(self, workload: Workload) -> None:
        """Serve these models from now on; the declared rate of a new one is its first estimate."""
        before, after = ({spec.name for spec in each.models} for each in (self._workload, workload))
        self._workload = workload
        self._estimates.set_workload(workload, self.plan)
        changed = ", ".join(sorted(before ^ after) or ["its entries"])
        self._reasons[Reason.WORKLOAD] = f"the workload changed ({changed})"
        self._questions.forget_answer()
        self._questions.out = None  # it asked about another workload
        self.advice = None

    def edit(self, entries: Mapping[str, ModelSpec | None]) -> None:
        """Set models' entries in the workload, or remove them (None). Going back to a previous plan keeps them."""
        self._edits |= entries
        self.set_workload(self._edited(self._workload))

    def withdraw(self, name: str, why: str) -> None:
        """Take a version back: it gets no more requests, and its place becomes free."""
        self._change_state.withdraw(name, why)
        self.edit(without(self._workload, {name}))

    def _edited(self, workload: Workload) -> Workload:
        entries = {spec.name: spec for spec in workload.models} | self._edits
        models = tuple(spec for spec in entries.values() if spec is not None)
        if not workload.applications:
            return workload.model_copy(update={"models": models})
        return with_models(workload, models)

    def deploy(
        self, now_s: float, target: Plan, why: str, gpus: tuple[Gpu, ...], declared: Workload | None = None
    ) -> None:
        """Go over to an operator's plan, make before break, whether or not it pays. A change under way stops where it
        is. Call after the first look.

        `gpus`: those present, with those that the plan brings. `declared`: the workload, when it differs from the
        plan's; edits since the last plan file stay, but models get the versions and shares that they have in the plan.
        """
        self._now_s, self._change_state.gpus = now_s, gpus
        self._idle_models.restart(now_s)
        self._idle = []
        if declared is None:
            self._edits.clear()
        else:
            self._edits |= as_split(self._workload, declared, target.models)
        self.set_workload(self._edited(declared or target.workload))
        if declared is not None:
            target = without_others(target, self._workload)
        self._reasons.clear()
        missing = {spec.name for spec in self._workload.models} - {spec.name for spec in target.models}
        self._set(Reason.WORKLOAD, missing, f"the plan that came back lacks {', '.join(sorted(missing))}")
        undrained = [name for name in self.plan.drained if name not in target.drained]
        self._set_came(undrained, f"{', '.join(undrained)} is no longer drained")
        self._standby_of = None  # they may have to wait elsewhere now
        self._begin(target, why)

    def refused(self, now_s: float, why: str) -> None:
        """The plan cannot be applied: go back to the previous one."""
        self._now_s = now_s
        if self.change is not None:
            self._take_back(self.change, f"it cannot be applied: {why}")

    def pause(self, *, paused: bool) -> None:
        """Change nothing (True), or change again (False); a change under way is finished."""
        self.paused = paused
        self.note(LogLine(self._now_s, Kind.PAUSED if paused else Kind.RESUMED, "by an operator"))

    def note(self, entry: LogLine) -> None:
        """Write a line into the log; the driver writes what it does by itself."""
        self._decisions.append(entry)

    def _mention(self, entry: LogLine, *about: object) -> None:
        """Note a line that changes nothing, unless the same was noted within the horizon."""
        what, horizon_s = (entry.kind, about), self._settings.change.horizon_s
        self._said = {said: at_s for said, at_s in self._said.items() if entry.at_s - at_s < horizon_s}
        if what not in self._said:
            self._said[what] = entry.at_s
            self.note(entry)

    # --- out ----------------------------------------------------------------------------------------------------------

    def take_decisions(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first."""
        decisions = list(self._decisions)
        self._decisions.clear()
        return decisions

    @property
    def plan(self) -> Plan:
        """The plan that was applied last."""
        return self._change_state.plan

    @property
    def workload(self) -> Workload:
        """The models to serve, as declared."""
        return self._workload

    @property
    def change(self) -> ChangeUnderWay | None:
        """The change that is under way."""
        return self._change_state.change

    @property
    def rates(self) -> Rates:
        """The estimates of the rates."""
        return self._estimates.rates

    def memory(self) -> Memory:
        """Return what outlives the controller; write it whenever `take_decisions` returned something."""
        estimates, change_state = self._estimates, self._change_state
        return Memory(
            self.plan,
            self._workload,
            estimates.rates.memory(),
            dict(estimates.slowdowns),
            dict(estimates.surpluses),
            change_state.durations,
            *change_state.rate_limit.memory(),
            self.paused,
            change_state.change,
            change_state.proving,
            dict(self._edits),
        )

    def state(self) -> ControllerState:
        """Return the controller's state for operators."""
        change = self.change
        return ControllerState(
            mode=self.mode,
            paused=self.paused,
            change=None if change is None else ChangeStatus(change.why, change.begun_s),
            policy=(self._settings.policy or self.plan.policy).name,
            rates_rps=self.rates.mean_rps,
            planned_for_rps=self._traffic().upper_rps,
            slowdowns=dict(self._estimates.slowdowns),
            sought=self._reasons.get(Reason.WORKLOAD, ""),
            missing_gpus=dict(self._gpu_requests.missing),
            late_gpus=sorted(self._gpu_requests.given_up),
            obstacle="the mode is off" if self.mode == "off" else self._obstacle(saves_only=False) or "",
        )

    # --- what runs ----------------------------------------------------------------------------------------------------

    def _traffic(self, lasting_s: float = 0.0) -> Traffic:
        """Return the traffic to carry from the end of a change that begins now, for `lasting_s`."""
        return self._shared_out(self._estimates.traffic(self._change_state.durations.start_s + lasting_s))

    def _shared_out(self, traffic: Traffic) -> Traffic:
        """Return the traffic by declared model, with requests split among versions as declared."""
        rates = shared_out(traffic.mean_rps, self.plan.models, self._workload.models)
        for spec in self._idle:
            rates.pop(spec.name, None)
        return Traffic(rates, traffic.dispersion, traffic.sigmas)

    def _short(self, plan: Plan) -> Mapping[str, float]:
        """Return the models of which a plan would have too few requests in time, and the part in time."""
        return self._estimates.outlook(self._change_state.here(plan), self._traffic())[1]

    def _notice_gpus(self, gpus: tuple[Gpu, ...]) -> bool:
        """Note which GPUs are present; return whether one in use is lost."""
        before, after = {gpu.id for gpu in self._change_state.gpus}, {gpu.id for gpu in gpus}
        self._change_state.gpus = gpus
        lost, came = before - after, after - before
        if not (lost or came):
            return False
        own = {gpu.id for gpu in self.plan.gpus if gpu.mig == "managed" and gpu.instance is not None}
        usable = sorted((came - own) & {gpu.id for gpu in self._change_state.usable})
        self._set_came(before and usable, f"GPU {', '.join(usable)} is new")
        if lost:
            self._reasons.pop(Reason.CAME, None)
        if after >= set(self.plan.used_gpus):
            self._reasons.pop(Reason.LOST, None)
        self._questions.forget_answer()
        self._estimates.unsettle(self._now_s)
        if lost.isdisjoint(self.plan.used_gpus):
            return False
        if self._settings.when.lost:
            self._reasons[Reason.LOST] = f"GPU {', '.join(sorted(lost))} is gone"
        self._change_state.lose(self._now_s, sorted(lost))
        return True

    def _notice_leaving(self, leaving: Mapping[str, float]) -> None:
        """Note which GPUs end soon. Those in use are a reason to plan again that no failed change before delays."""
        state, used = self._change_state, set(self.plan.used_gpus) & leaving.keys()
        nodes = {node_of(gpu): leaving[gpu] - self._now_s for gpu in sorted(used)}
        ends = ", ".join(
            f"{node} ends {f'in {left_s:.0f} s' if left_s > 0 else 'soon'}" for node, left_s in nodes.items()
        )
        if used and leaving.keys() - state.leaving:
            state.rate_limit.forgive()
        given_up = self._gpu_requests.given_up
        may_come = any(bound.max and kind not in given_up for kind, bound in self._settings.gpus.items())
        # limit: for a plan and a change; twice that where no other GPU may come before the end
        enough_s = (1.0 if may_come else 2.0) * (state.durations.start_s + self._settings.interval_s)
        ends_soon = any(left_s <= enough_s for left_s in nodes.values())
        if leaving.keys() != state.leaving or ends_soon != self._ends_soon:
            self._questions.forget_answer()
        state.leaving, self._ends_soon = frozenset(leaving), ends_soon
        self._set(Reason.LEAVING, used, ends)

    def _without_leaving(self) -> Plan | None:
        """Return the running plan without those gpu-lets on GPUs that end soon whose models are served elsewhere; None
        when there are none."""
        stays = on_gpus(self.plan, self._change_state.usable)
        elsewhere = {replica.name for gpulet in stays.gpulets for replica in gpulet.models}
        left = [g for g in self.plan.gpulets if g in stays.gpulets or not {r.name for r in g.models} <= elsewhere]
        return None if len(left) == len(self.plan.gpulets) else with_gpulets(self.plan, left)

    def _set_came(self, has_come: object, why: str) -> None:
        if has_come and self._settings.when.came:
            self._reasons[Reason.CAME] = why

    def _go_on(self, seen: Observation, news: EstimateUpdate) -> None:
        """Go on with the change under way, or judge the last one.

        When models lose requests since the last change that did not before, and both plans would have theirs in time,
        the change is taken back. A change that drains a place is not: whoever asked for it was told what it loses. Nor
        is one that left a node which ends: its gpu-lets would start there for seconds.
        """
        under_way, last, leaving = self.change, self._change_state.proving, self._change_state.leaving
        drains = last is not None and not set(last.target.drained) <= set(last.origin.drained)
        if under_way is None and last is not None and not drains and leaving.isdisjoint(last.origin.used_gpus):
            new = [name for name in news.losing if name not in last.suffered]
            if new and {*self._short(last.origin), *self._short(last.target)}.isdisjoint(new):
                parts = listed(self._estimates.attainment.lost_part(new), "{:.1%}")
                why = f"since the change more requests are lost than allowed: {parts}"
                self._take_back(last, why, last.stage.gpulets)
        failures = self._change_state.rate_limit.failures
        self._stuck(self._change_state.look(self._now_s, seen, self.rates.mean_rps))
        if self._change_state.rate_limit.failures > failures:
            self._questions.forget_answer()
            if under_way is not None:
                self._give_up_versions(under_way)
        if under_way is not None and self.change is None:
            self._estimates.attainment.forget()
            self._estimates.unsettle(self._now_s)

    def _give_up_versions(self, failed: ChangeUnderWay) -> None:
        """Remove the versions that a failed change brought: the next change would fail with them, too."""
        before = {spec.name for spec in failed.origin.models}
        new = [spec.name for spec in self._workload.models if spec.is_tried and spec.name not in before]
        if new:
            why = f"{', '.join(new)} is removed: the change that brought it failed"
            self.note(LogLine(self._now_s, Kind.CANARY, why))
            self.edit(without(self._workload, new))

    def _judge_canaries(self, seen: Observation) -> None:
        """Take back versions that are worse than the version beside them."""
        confidence = self._settings.canary.confidence
        if self._canaries is None or confidence is None:
            return
        # Others may have been promoted meanwhile.
        tried = {spec.name for spec in self._workload.models if spec.is_tried}
        for verdict in self._canaries.observe(self.plan.models, seen.models):
            if verdict.name not in tried:
                continue
            obstacle = "changes are paused" if self.paused else None
            if self.mode != "act":
                obstacle = f"the mode is {self.mode}; use `tenuto model take-back`"
            line = journal.worse(self._now_s, verdict, confidence, obstacle)
            self._mention(line, verdict.name)
            if obstacle is None:
                self.withdraw(verdict.name, line.text)

    # --- idle models --------------------------------------------------------------------------------------------------

    @property
    def _wake_s(self) -> float:
        """How long it takes until an idle model serves again, from the request that wakes it."""
        return self._idle_models.wake_s or self._change_state.durations.start_s

    def _follow_idle_models(self) -> None:
        """Bring models back that are asked again, and end the gpu-lets of models that nobody asks."""
        idle, away = self._idle, self.plan.idle
        woken = away.keys() & {spec.name for spec in self._workload.models} - {spec.name for spec in idle}
        if woken and Reason.ASKED not in self._reasons:
            self._estimates.expect_declared(woken, self._workload, self.plan)
            self._questions.forget_answer()
            self._questions.out = None  # it asked for no places for them
        if woken or self._idle_models.waking:
            self._idle_models.follow_start(self._now_s, woken)
        self._set(Reason.ASKED, woken, f"{', '.join(sorted(woken))} is asked again")
        leaving = ", ".join(spec.name for spec in idle if spec.name not in away)
        if not leaving or self._obstacle(saves_only=True) is not None:
            return
        why = f"nobody has asked {leaving} for as long as idle_after_s says"
        self.note(LogLine(self._now_s, Kind.CHANGE, why))
        self._questions.forget_answer()
        self._questions.out = None  # it asked for places for them
        self._begin(with_idle(self.plan, idle, self._wake_s), why)
        if len(idle) < len(self._workload.models):
            self._reasons[Reason.IDLE] = f"{leaving} has left"
        else:
            self._want_gpus({})

    # --- reasons ------------------------------------------------------------------------------------------------------

    def _find_reasons(self, news: EstimateUpdate) -> None:
        when, estimates = self._settings.when, self._estimates
        slow = estimates.slow_news()
        is_news = news.jumped or (slow is not None and Reason.SLOW not in self._reasons)
        self._set(Reason.SLOW, slow, slow or "")
        if slow is not None or estimates.lengths.have_moved(self._workload.models):
            self._questions.forget_answer()
        if news.losing and when.slo and not estimates.is_unsettled(self._now_s):
            parts = estimates.attainment.lost_part(news.losing)
            self._reasons[Reason.SLO] = f"more requests are lost than allowed: {listed(parts, '{:.1%}')}"
        elif Reason.SLO in self._reasons and not estimates.losing_too_much():
            del self._reasons[Reason.SLO]
        is_due = self._now_s - self._checked_s >= self._settings.interval_s - 1e-6
        losses = (frozenset(news.losing), estimates.is_unsettled(self._now_s)) if news.losing else None
        is_new_loss = losses is not None and losses != self._compared_losses  # others wait for the next check
        self._compared_losses = losses
        if not (is_due or is_news or is_new_loss):
            return
        is_short = self._compare_rates(adds=is_due)
        if news.losing and Reason.SLO in self._reasons and not is_short:
            estimates.raise_surplus(news.losing)
        if not is_due:
            return
        self._checked_s = self._now_s
        acts = self.mode == "act" and not self.paused
        if acts and self._wants_standby and self.plan.gpulets != self._standby_of:
            self._reasons[Reason.STANDBY] = "the plan has no standby processes yet"

    def _compare_rates(self, *, adds: bool) -> bool:
        """Renew the reasons that rates give, and drop those that no longer hold. Return whether the running plan would
        have too few requests in time. `adds`: also give reasons to save GPUs, or to follow moved rates."""
        when, self._compared_s = self._settings.when, self._now_s
        # The prediction covers the time until a change from the next check would be finished.
        traffic = self._traffic(self._settings.interval_s)
        outlook, short = self._estimates.outlook(self._change_state.here(self.plan), traffic)
        self._set(
            Reason.OVERLOAD, when.overload and short, f"too few requests would be in time: {listed(short, '{:.1%}')}"
        )
        busy = max(when.underused or 0.0, self._spare_gpu_load())
        is_idle = when.underused is not None and outlook.load < busy and not short
        self._set(
            Reason.UNDERUSED, is_idle, f"even the busiest gpu-lets would be only {outlook.load:.0%} busy", adds=adds
        )
        moved = {} if when.rate is None else self._questions.moved(traffic.upper_rps, when.rate)
        self._set(Reason.RATE, moved, f"rates have moved: {listed(moved, '{:.0f} r/s')}", adds=adds)
        return bool(short)

    def _set(self, kind: Reason, holds: object, why: str, *, adds: bool = True) -> None:
        """Give a reason, or drop it."""
        if holds and (adds or kind in self._reasons):
            self._reasons[kind] = why
        elif not holds:
            self._reasons.pop(kind, None)

    def _spare_gpu_load(self) -> float:
        """Return the load below which one GPU fewer may do: (n - 1) / n of n GPUs; 0 when GPUs cannot be given back.

        With several types, GPUs of another type may cost less at any load.
        """
        used = len(self.plan.used_gpus)
        if sum(bound.max > 0 for bound in self._settings.gpus.values()) > 1 or self._spare_nodes():
            return 1.0
        return 1.0 - 1.0 / used if self._settings.gpus and used else 0.0

    def _spare_nodes(self) -> bool:
        """Whether GPUs in use could lie on fewer nodes, where nodes are given back whole."""
        sizes = Counter(node_of(gpu.id) for gpu in self._change_state.usable)
        used = Counter(map(node_of, self.plan.used_gpus))
        fewer = sorted((sizes[node] for node in used), reverse=True)[:-1]
        is_by_node = any(bound.per_node > 1 for bound in self._settings.gpus.values())
        return is_by_node and sum(used.values()) <= sum(fewer)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the planner when there is a reason that it has not answered yet."""
        questions, change = self._questions, self._settings.change
        if questions.out is not None:
            questions.count_time(self._now_s)
            if self._now_s - questions.out.since_s > change.plan_timeout_s:
                why = f"the planner took more than {change.plan_timeout_s:g} s. Raise change.plan_timeout_s"
                self.planned(self._now_s, questions.out.number, why)
                return
            if not questions.gives_way(self._reasons, self._change_state.gpus) or self._obstacle(saves_only=False):
                return
            questions.out = None
        idle = {spec.name for spec in self._idle}
        models = tuple(spec for spec in self._workload.models if spec.name not in idle)
        if not self._reasons or not models:
            return
        needs, kinds = self._traffic().upper_rps, frozenset(self._reasons)
        if Reason.STANDBY not in kinds and questions.has_answered(self._now_s, needs, kinds):
            self._reasons.clear()
            return
        is_saving = kinds <= SAVING
        if (is_saving and self._now_s < questions.may_save_s) or self._obstacle(saves_only=is_saving) is not None:
            return
        if self._compared_s < self._now_s:  # a reason may no longer hold after waiting
            self._compare_rates(adds=False)
            if not self._reasons:
                return
            kinds = frozenset(self._reasons)
        request = self._plan_request(models, only_standby=kinds == {Reason.STANDBY})
        self._decisions.append(MakePlan(questions.ask(self._now_s, needs, kinds, self._change_state.gpus), request))

    def _plan_request(self, models: tuple[ModelSpec, ...], *, only_standby: bool) -> PlanRequest:
        """Return the question for a plan of these models, by what is known now."""
        settings, estimates, state = self._settings, self._estimates, self._change_state
        start_s, ahead_s = state.durations.start_s, state.durations.start_s + settings.interval_s
        estimates.lengths.asked(models)
        models, running = estimates.lengths.measured(models), state.here(self.plan)
        served = tuple(spec for spec in running.models if spec.name not in running.idle)
        update: dict[str, object] = {
            "models": estimates.lengths.measured(served),
            "unserved": tuple(name for name in running.unserved if name not in running.idle),
            "idle": {},
            "drained": (*running.drained, *sorted(state.leaving)),
        }
        terms = ChangeTerms(
            shared_out(estimates.rates.expected_rps(ahead_s), self.plan.models, models),
            state.durations,
            settings.change.horizon_s,
            settings.change.hysteresis,
            settings.rates.average_s,
            self._gpu_requests.come_s,
        )
        bounds, present, given_up = settings.gpus, self._present, self._gpu_requests.given_up
        growth = tuple(kind for kind, bound in bounds.items() if bound.max > 0 and kind not in given_up)
        limits = {kind: max(present[kind], bounds[kind].max if kind in growth else 0) for kind in (*present, *bounds)}
        return PlanRequest(
            self._workload.model_copy(update={"applications": (), "models": models}),
            tuple(_offered(gpu, bounds.get(gpu.whole_type), start_s) for gpu in state.gpus),
            settings.policy or PolicyUsed(name=self.plan.policy.name, options=self.plan.policy.options),
            RunningPlan(
                running.model_copy(update=update),
                self._shared_out(estimates.traffic(ahead_s)),
                terms,
                growth=growth,
                cut=frozenset(kind for kind in growth if bounds[kind].mig == "managed"),
                by_node=frozenset(kind for kind in growth if bounds[kind].per_node > 1),
                limits=limits if bounds else {},
                prices={kind: each.price_per_hour for kind, each in bounds.items() if each.price_per_hour is not None},
                spot={kind: each.spot.taking(start_s) for kind, each in bounds.items() if each.spot is not None},
                slowdowns=estimates.planned_with(),
                attainment=settings.attainment,
                reserved_ids=frozenset(standby.gpulet.id for standby in state.standby),
            ),
            standby_pct=settings.standby_pct,
            standby_gpus=settings.standby_gpus,
            only_standby=only_standby,
        )

    @property
    def _present(self) -> Counter[str]:
        """How many GPUs of each type plans may use."""
        managed = {g.device: g.whole_type for g in self._change_state.usable if g.mig == "managed"}
        return Counter([*managed.values(), *(g.type for g in self._change_state.usable if g.mig != "managed")])

    def _is_outgrown(self, plan: Plan) -> bool:
        """Whether a plan carries too little for the present rates. When a rate jumps, little is known of it at the time
        of asking. To apply this plan and then another would take two starts."""
        return self._questions.is_outgrown(self._traffic().upper_rps) and bool(self._short(plan))

    def _obstacle(self, *, saves_only: bool) -> str | None:
        """Return what forbids a change now, in words; None when nothing does."""
        if self.paused:
            return "changes are paused"
        return self._change_state.rate_limit.obstacle(self._now_s, saves_only=saves_only)

    def _want_gpus(self, needed: Mapping[str, int]) -> None:
        """Report how many GPUs would carry everything: to the autoscaler, or in the log when the cluster is fixed."""
        present, bounds = self._present, self._settings.gpus
        totals = self._gpu_requests.update_totals(self._now_s, needed, present)
        if totals is not None:
            self._decisions.append(WantGpus(totals, {kind: n - present[kind] for kind, n in totals.items()}))
            if missing := self._gpu_requests.missing:
                self.note(journal.gpus_requested(self._now_s, missing))
        missing = {
            kind: count - max(present[kind], bounds[kind].max if kind in bounds else 0)
            for kind, count in needed.items()
        }
        short = {kind: count for kind, count in missing.items() if count > 0}
        if short:
            self._mention(journal.gpus_missing(self._now_s, short), *short.items())

    # --- standby ------------------------------------------------------------------------------------------------------

    @property
    def _wants_standby(self) -> bool:
        return self._settings.standby_pct is not None or self._settings.standby_gpus > 0

    def _keep_on_standby(self, result: Proposal, why: str) -> None:
        """Apply the standby processes for the running plan. For a coming plan they are asked for once it runs."""
        is_kept = result.plan is None or not result.worth.pays
        # Only its rates change, right after this.
        is_told = result.plan is not None and result.plan.gpulets == self.plan.gpulets
        if not self._wants_standby or not (is_kept or is_told) or self.mode != "act" or self.paused:
            return
        self._standby_of = self.plan.gpulets
        if result.standby == self._change_state.standby:
            return
        self._change_state.standby = result.standby
        shares = {standby.gpulet.id: f"{standby.gpulet.effective_share_pct:g} %" for standby in result.standby}
        self.note(journal.on_standby(self._now_s, why, shares))
        if is_kept:
            self._change_state.apply(self.plan, why)

    def _let_standby_take_over(self, news: EstimateUpdate, ready: frozenset[str], *, is_news: bool) -> None:
        """Use idle processes when that helps models that lose requests, or are about to: because batches are slow, a
        rate jumped or a GPU is lost."""
        short = set(news.losing)
        if is_news or news.slower:
            expected_short = self._short(self.plan).keys()
            short |= expected_short if is_news else expected_short & set(news.slower)
        if not short or self.mode != "act" or self._obstacle(saves_only=False) is not None:
            return
        change_state, slowdowns = self._change_state, self._estimates.slowdowns
        target = taken_over(
            self.plan, change_state.standby, ready, short, self._traffic(), slowdowns, change_state.gpus
        )
        if target is None:
            return
        before = {gpulet.id for gpulet in self.plan.gpulets}
        names = ", ".join(sorted(gpulet.id for gpulet in target.gpulets if gpulet.id not in before))
        known = [self._reasons[Reason.LOST]] if Reason.LOST in self._reasons else []
        known += [f"batches of '{name}' take {slowdowns[name]:.2f} times their profiled time" for name in news.slower]
        known += [f"{', '.join(news.losing)} loses more requests than allowed"] if news.losing else []
        why = known[0] if known else f"{', '.join(sorted(short))} gets more requests than the running plan can carry"
        why = f"{why}: standby {names} takes over"
        self.note(LogLine(self._now_s, Kind.CHANGE, why))
        change_state.take_over(self._now_s, target, why, sorted(short))
        self._standby_of, self._questions.out = None, None
        self._questions.forget_answer()
        self._reasons.clear()
        self._checked_s = -math.inf  # check right after it whether that is enough

    # --- changing -----------------------------------------------------------------------------------------------------

    def _begin(self, target: Plan, why: str) -> None:
        self._change_state.begin(self._now_s, target, why, self._estimates.losing_too_much(), self.rates.mean_rps)

    def _take_back(self, change: ChangeUnderWay, why: str, held: Sequence[Gpulet] | None = None) -> None:
        self._questions.forget_answer()  # asked again when the wait is over
        self._stuck(self._change_state.take_back(self._now_s, change, why, self.rates.mean_rps, held))
        self._give_up_versions(change)

    def _stuck(self, why: str | None) -> None:
        if why is not None:
            self._reasons[Reason.STUCK] = why


def _offered(gpu: Gpu, bounds: GpuBounds | None, start_s: float) -> Gpu:
    """Return a GPU as the planner is to weigh it: at the price of its type, or of its part of a GPU, and lost as GPUs
    of a spot market are, where starts take so long."""
    update: dict[str, object] = {} if gpu.spot is None else {"spot": gpu.spot.taking(start_s)}
    if bounds is not None and bounds.price_per_hour is not None:
        update["price_per_hour"] = bounds.price_per_hour * gpu.part
    if bounds is not None and bounds.spot is not None:
        update |= {"spot": bounds.spot.taking(start_s), "rack": gpu.rack or SPOT}
    return gpu.model_copy(update=update) if update else gpu
