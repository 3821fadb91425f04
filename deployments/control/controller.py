"""The controller: observations and time in, decisions with their reasons out; no I/O, no clock, no randomness.

Read it from `observe` down. Every look goes the same way: learn (rates, attainment, slow replicas), move a change that
is under way one step on, or find reasons to plan again. A plan comes back through `planned`, and becomes a change if it
pays. Whatever happens in between, what serves goes on serving: a plan that does not come, breaks a rule, carries less
or does not become ready changes nothing, or is taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tenuto.deployments.control import journal
from tenuto.deployments.control.attainment import Attainment
from tenuto.deployments.control.interface import Apply, Decision, MakePlan, Observation, WantGpus
from tenuto.deployments.control.journal import Kind, Reason, listed
from tenuto.deployments.control.memory import ChangeUnderWay, Memory
from tenuto.deployments.control.pace import Pace
from tenuto.deployments.control.planning import PlanRequest, Proposal
from tenuto.deployments.control.rates import Rates
from tenuto.deployments.control.settings import ControlSettings, Mode
from tenuto.deployments.control.standby import Standby, falling_short, still_fitting, taken_over
from tenuto.deployments.control.steps import next_stage
from tenuto.deployments.control.worth import Durations
from tenuto.deployments.wire.status import ChangeStatus, ControllerState, LogLine
from tenuto.placement import Gpulet, Plan, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.expectation.outlook import Outlook, Outlooks, Traffic
from tenuto.placement.plan import PolicyUsed

MOVED_ENOUGH = 0.05  # of a need: below it the same question would get the same answer
CHANCE = 3.0  # derived: standard deviations that a steady rate leaves by chance in 0.3 % of the looks
FOLLOW = 0.3  # derived from the dispatcher's own corrections (`LatencyRatios`): weight of the newest in its average


class Controller:
    """Invariant: at most one change and one question to the planner at a time."""

    def __init__(self, settings: ControlSettings, memory: Memory) -> None:
        """Begin, or begin again, from what is remembered."""
        self._settings = settings
        self.mode: Mode = settings.mode
        self._workload = memory.workload
        self._plan = memory.plan
        declared = {spec.name: spec.rate_rps for spec in memory.workload.models}
        self._rates = Rates(
            declared,
            average_s=settings.rates.average_s,
            settle_s=settings.rates.settle_s,
            target=settings.attainment,
            floor_rps=settings.rates.floor_rps,
            memory=memory.rates,
        )
        self._attainment = Attainment(tuple(declared), target=settings.attainment, window_s=settings.change.horizon_s)
        self._slowdowns = dict(memory.slowdowns)
        self._asked_slowdowns = dict(memory.slowdowns)  # what was planned with last
        self._surplus = dict(memory.surplus)
        change = settings.change
        self._durations = memory.durations or Durations(change.start_s, change.load_s)
        self._pace = Pace(change, memory.changes_s, memory.quiet_until_s, memory.failures)
        self.paused = memory.paused
        self._change, self._proving = memory.change, memory.proving
        self._gpus: tuple[Gpu, ...] = ()
        # (number, since, GPUs) of the question that is out
        self._asked: tuple[int, float, tuple[Gpu, ...]] | None = None
        self._number = 0
        self._is_repeated = False  # whether the question is asked again, as its first answer was outgrown
        self._planned_with: dict[str, float] = {s.name: s.rate_rps for s in memory.plan.models}
        # Needs, reasons and time of the last question.
        self._answered: tuple[dict[str, float], frozenset[Reason], float] | None = None
        self._reasons: dict[Reason, str] = {}  # why to plan again, by kind
        self._checked_s = -settings.interval_s
        self._checked_needs: dict[str, float] = {}
        self._unsettled_s = 0.0  # when something last happened that explains lost requests
        self._now_s = 0.0
        self._last_s: float | None = None
        self._decisions: list[Decision] = []
        self._wanted: Mapping[str, int] | None = None
        self._standby: tuple[Standby, ...] = ()  # idle processes
        self._standby_of: tuple[Gpulet, ...] | None = None  # the gpu-lets they were asked for

    # --- in -----------------------------------------------------------------------------------------------------------

    def observe(self, now_s: float, seen: Observation) -> None:
        """Take one look."""
        seconds = self._settings.look_s if self._last_s is None else now_s - self._last_s
        seconds = max(1e-3, seconds if seen.seconds is None else seen.seconds)
        self._now_s = self._last_s = now_s
        jumped = False
        if seen.models:
            jumped = bool(self._rates.observe(now_s, seconds, {name: m.arrived for name, m in seen.models.items()}))
        if jumped:
            self._unsettled_s = now_s
        losing = self._attainment.observe(
            now_s, {n: m.good for n, m in seen.models.items()}, {n: m.bad for n, m in seen.models.items()}
        )
        slower = self._learn_slowdowns(seen)
        lost = self._notice_gpus(seen)
        if self._change is not None:
            self._go_on(seen)
        elif self._proving is not None and losing:
            self._take_back_if_worse(losing)
        if self._proving is not None and now_s - self._proving.stage_since_s > self._settings.change.prove_s:
            self._proving = None
            self._pace.proved()
        if self._change is None and self._standby:
            self._let_standby_take_over(losing, slower, seen, is_news=jumped or lost)
        if self._change is None and self.mode != "off":
            self._find_reasons(losing, jumped)
            self._ask()

    def planned(self, now_s: float, number: int, result: Proposal | str) -> None:
        """Take the planner's result, or why there is none."""
        self._now_s = now_s
        if self._asked is None or self._asked[0] != number:
            return
        _, since_s, gpus = self._asked
        planning_s = now_s - since_s
        self._asked = None
        if gpus != self._gpus:  # of a cluster that is another now: the next look asks again, for the same reasons
            self._answered = None
            return
        reasons, self._reasons = self._reasons, {}
        why = "; ".join(reasons.values())
        if isinstance(result, Proposal):
            self._keep_on_standby(result, why)
            reasons.pop(Reason.STANDBY, None)
            if not reasons:
                return
            why = "; ".join(reasons.values())
        if isinstance(result, str):
            self.note(journal.no_plan(now_s, reasons, result))
            return
        self._want(result)
        plan, worth = result.plan, result.worth
        weighed = (now_s, reasons, result, planning_s)
        if plan is None or not worth.pays:
            self.note(journal.weighed(Kind.KEPT, *weighed))
            return
        is_repeated, self._is_repeated = self._is_repeated, False
        if not is_repeated and self._is_outgrown(plan):
            self._reasons, self._answered, self._is_repeated = reasons, None, True
            self._ask()
            return
        if plan.gpulets == self._plan.gpulets and not self.paused:
            self._tell_rates(plan, journal.weighed(Kind.RATES, *weighed))
            return
        saves_only = worth.saved_rent > 0.0
        obstacle = self._obstacle(saves_only=saves_only)
        if saves_only and reasons.keys() & {Reason.SLO, Reason.OVERLOAD}:
            obstacle = "GPUs are not given up while requests are lost"
        if obstacle is not None:
            self._answered = None  # asked again once that has passed
            self.note(journal.weighed(Kind.KEPT, *weighed, obstacle))
            return
        self.note(journal.weighed(Kind.CHANGE if self.mode == "act" else Kind.ADVICE, *weighed))
        if self.mode == "act":
            self._begin(plan, why)

    def set_workload(self, workload: Workload) -> None:
        """Serve these models from now on; the declared rate of a new one is its first estimate."""
        before = {spec.name for spec in self._workload.models}
        after = {spec.name: spec.rate_rps for spec in workload.models}
        self._workload = workload
        self._rates.set_models(after)
        self._attainment.set_models(tuple(after))
        changed = sorted(before ^ after.keys()) or ["its entries"]
        self._reasons[Reason.WORKLOAD] = f"the workload changed ({', '.join(changed)})"
        self._answered = None

    def deploy(self, now_s: float, target: Plan, why: str, gpus: tuple[Gpu, ...]) -> None:
        """Go over to an operator's plan, make before break, whether or not it pays; a change under way is left where it
        is. `gpus` are those that are there, with those that the plan brings. Call after the first look."""
        self._now_s, self._gpus = now_s, gpus
        self.set_workload(target.workload)
        self._reasons.clear()
        self._change = self._proving = self._asked = None
        self._begin(target, why)

    def refused(self, now_s: float, why: str) -> None:
        """The plan that was to be applied cannot be; go back to the one before."""
        self._now_s = now_s
        if self._change is not None:
            self._take_back(self._change, f"it cannot be applied: {why}")

    def pause(self, *, paused: bool) -> None:
        """Change nothing, or change again; a change that is under way is finished."""
        self.paused = paused
        self.note(LogLine(self._now_s, Kind.PAUSED if paused else Kind.RESUMED, "by an operator"))

    def note(self, entry: LogLine) -> None:
        """Write something into the log; the driver does so with what it does by itself."""
        self._decisions.append(entry)

    # --- out ----------------------------------------------------------------------------------------------------------

    def drain(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first."""
        decisions, self._decisions = self._decisions, []
        return decisions

    @property
    def plan(self) -> Plan:
        """The plan that was applied last."""
        return self._plan

    @property
    def workload(self) -> Workload:
        """The models that are asked for."""
        return self._workload

    @property
    def change(self) -> ChangeUnderWay | None:
        """The change that is under way."""
        return self._change

    @property
    def rates(self) -> Rates:
        """What is known of the rates."""
        return self._rates

    def memory(self) -> Memory:
        """Return what outlives the controller; write it whenever `drain` returned something."""
        return Memory(
            self._plan,
            self._workload,
            self._rates.memory(),
            dict(self._slowdowns),
            dict(self._surplus),
            self._durations,
            *self._pace.memory(),
            self.paused,
            self._change,
            self._proving,
        )

    def state(self) -> ControllerState:
        """Return how it stands."""
        change = self._change
        return ControllerState(
            mode=self.mode,
            paused=self.paused,
            change=None if change is None else ChangeStatus(change.why, change.begun_s),
            policy=(self._settings.policy or self._plan.policy).name,
            rates_rps=self._rates.mean_rps,
            planned_for_rps=self.traffic().upper_rps,
            slowdowns=dict(self._slowdowns),
        )

    def traffic(self, *, lasting_s: float = 0.0) -> Traffic:
        """Return what has to be carried once a change that begins now is done, and for `lasting_s` from then on: what
        is expected with its bursts, times what unexplained losses have taught."""
        traffic, more = self._rates.traffic(self._durations.start_s + lasting_s), self._surplus
        return Traffic(
            {name: rate * more.get(name, 1.0) for name, rate in traffic.mean_rps.items()},
            {name: value * more.get(name, 1.0) for name, value in traffic.dispersion.items()},
            traffic.sigmas,
        )

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn_slowdowns(self, seen: Observation) -> list[str]:
        """Follow what batches take over their profile, by program: the slowest of its gpu-lets counts. Return the
        programs that are slower than planned, and more so than they were known to be."""
        ratios: dict[str, float] = {}
        slower = []
        for gpulet in seen.gpulets.values():
            for program, ratio in gpulet.ratio.items():
                ratios[program] = max(ratios.get(program, 0.0), ratio)
        threshold = self._settings.when.slow
        for program, ratio in ratios.items():
            known = self._slowdowns.get(program, 1.0)
            follow = ratio if abs(ratio - known) > (threshold or 0.1) * known else known + FOLLOW * (ratio - known)
            # What the first slow batches say is not all: a factor that was planned with and still moves is news sooner.
            asked = self._asked_slowdowns.get(program, 1.0)
            enough = threshold if threshold is None or abs(asked - 1.0) <= threshold else min(threshold, MOVED_ENOUGH)
            if enough is not None and abs(follow / asked - 1.0) > enough:
                self._reasons[Reason.SLOW] = (
                    f"batches of '{program}' take {follow:.2f} of their profile, not {asked:.2f}"
                )
                self._unsettled_s = self._now_s
                self._answered = None
            if follow > max(known, 1.0 + (threshold or 0.1)):
                slower.append(program)
            self._slowdowns[program] = follow
        return slower

    def _notice_gpus(self, seen: Observation) -> bool:
        """Follow which GPUs are there; return whether one in use is gone."""
        before, after = {gpu.id for gpu in self._gpus}, {gpu.id for gpu in seen.gpus}
        self._gpus = seen.gpus
        lost, came = before - after, after - before
        used = {gpulet.gpu for gpulet in self._plan.gpulets}
        if lost & used and self._settings.when.lost:
            self._reasons[Reason.LOST] = f"GPU {', '.join(sorted(lost))} is gone"
        if came and before and self._settings.when.came:
            self._reasons[Reason.CAME] = f"GPU {', '.join(sorted(came))} is new"
        if lost or came:
            self._answered = None
            self._unsettled_s = self._now_s
        if lost & used:
            # It explains what is lost from now on, and a change that failed before says nothing of the one needed now.
            self._proving = None
            self._pace.forgive()
        if lost & used and self._change is not None:
            self.note(journal.abandoned(self._now_s, sorted(lost)))
            self._change = None
        return bool(lost & used)

    # --- reasons ------------------------------------------------------------------------------------------------------

    def _find_reasons(self, losing: Sequence[str], jumped: bool) -> None:
        when = self._settings.when
        if losing and when.slo and not self._is_unsettled():
            parts = self._attainment.lost_part(losing)
            self._reasons[Reason.SLO] = "more is lost than allowed: " + listed(parts, "{:.1%}")
        is_due = self._now_s - self._checked_s >= self._settings.interval_s - 1e-6
        if not (is_due or jumped or losing):
            return
        # What comes before a change that the next check would begin could be done.
        traffic = self.traffic(lasting_s=self._settings.interval_s)
        needs = traffic.upper_rps
        if is_due:
            self._checked_s = self._now_s
        elif not _moved(self._checked_needs, needs, MOVED_ENOUGH):
            return
        self._checked_needs = needs
        acts = self.mode == "act" and not self.paused
        if acts and self._wants_standby and self._plan.gpulets != self._standby_of:
            self._reasons[Reason.STANDBY] = "standby processes are wanted for the plan"
        outlook, short = self._outlook(self._plan, traffic)
        if when.overload and short:
            # A plan that promised what it does not carry is no news; what it was made for is in `_answered`.
            self._reasons[Reason.OVERLOAD] = f"too few would be in time: {listed(short, '{:.1%}')}"
            self._reasons.pop(Reason.UNDERUSED, None)  # of a while ago
        if losing and Reason.SLO in self._reasons and not short:
            self._raise_surplus(losing)
        if is_due and when.underused is not None and outlook.load < max(when.underused, self._spare_gpu_load()):
            self._reasons[Reason.UNDERUSED] = f"the busiest gpu-lets would be {outlook.load:.0%} busy"
        if is_due and when.rate is not None:
            moved = self._moved_rates(needs)
            if moved:
                self._reasons[Reason.RATE] = f"rates have moved: {listed(moved, '{:.0f} r/s')}"

    def _spare_gpu_load(self) -> float:
        """Return the load below which one GPU less may do, where they can be given back: (n - 1) / n of n GPUs."""
        used = len({gpulet.gpu for gpulet in self._plan.gpulets})
        return 1.0 - 1.0 / used if self._settings.gpus and used else 0.0

    def _outlook(self, plan: Plan, traffic: Traffic) -> tuple[Outlook, dict[str, float]]:
        """Return what a plan would serve on the GPUs that are there, and the models of which too few requests would be
        in time, with how many."""
        outlook = Outlooks(self._slowdowns).of(self._here(plan, plan.gpulets), traffic)
        parts = {name: outlook.parts.get(name, 0.0) for name in traffic.mean_rps}
        return outlook, {name: part for name, part in parts.items() if part < self._settings.attainment}

    def _moved_rates(self, needs: Mapping[str, float]) -> dict[str, float]:
        moved = self._settings.when.rate
        if moved is None:
            return {}
        found = {}
        for name, now in needs.items():
            before = self._planned_with.get(name, now)
            by_ratio = moved.ratio is not None and not 1.0 / moved.ratio <= now / before <= moved.ratio
            if by_ratio or (moved.rps is not None and abs(now - before) >= moved.rps):
                found[name] = now
        return found

    def _is_unsettled(self) -> bool:
        """Whether something happened lately that explains lost requests."""
        return self._now_s - self._unsettled_s < self._settings.interval_s

    def _raise_surplus(self, losing: Sequence[str]) -> None:
        """Plan for more than is offered where everything else is as planned and requests are lost all the same: with a
        part r lost, N/(1-r) of what was planned for would carry all (Symphony, section 3.5)."""
        for name, part in self._attainment.lost_part(losing).items():
            self._surplus[name] = self._surplus.get(name, 1.0) / max(0.25, 1.0 - part)
        self._attainment.forget()

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the planner, if there is a reason that it has not answered already."""
        if self._asked is not None:
            if self._now_s - self._asked[1] > self._settings.change.plan_timeout_s:
                self.planned(self._now_s, self._asked[0], "the planner took too long")
            return
        if not self._reasons:
            return
        needs, kinds = self.traffic().upper_rps, frozenset(self._reasons)
        known = self._answered
        if Reason.STANDBY not in kinds and known is not None and kinds <= known[1]:
            is_fresh = self._now_s - known[2] < self._settings.change.horizon_s
            if is_fresh and not self._is_news(known[0], needs):
                self._reasons.clear()
                return
        if self._obstacle(saves_only=kinds <= {Reason.UNDERUSED, Reason.RATE}) is not None:
            return
        self._answered = needs, kinds, self._now_s
        self._asked_slowdowns = dict(self._slowdowns)
        self._planned_with = needs
        self._number += 1
        self._asked = self._number, self._now_s, self._gpus
        request = PlanRequest(
            workload=self._workload.model_copy(update={"applications": ()}),
            traffic=self.traffic(lasting_s=self._settings.interval_s),
            expected_rps=self._rates.expected_rps(self._durations.start_s + self._settings.interval_s),
            running=self._here(self._plan, self._plan.gpulets),
            gpus=self._gpus,
            policy=self._settings.policy or PolicyUsed(name=self._plan.policy.name, options=self._plan.policy.options),
            durations=self._durations,
            horizon_s=self._settings.change.horizon_s,
            hysteresis=self._settings.change.hysteresis,
            types={kind: bounds.max for kind, bounds in self._settings.gpus.items() if bounds.max > 0},
            slowdowns=dict(self._slowdowns),
            attainment=self._settings.attainment,
            standby_pct=self._settings.standby_pct,
            standby_gpus=self._settings.standby_gpus,
            standby_ids=frozenset(standby.gpulet.id for standby in self._standby),
            only_standby=kinds == {Reason.STANDBY},
        )
        self._decisions.append(MakePlan(self._number, request))

    def _is_outgrown(self, plan: Plan) -> bool:
        """Whether a plan does not carry what is needed by now: little was known of a rate that had just jumped when it
        was asked for. To begin with it and go on to another would take two starts."""
        if self._answered is None or not self._is_news(self._answered[0], self.traffic().upper_rps):
            return False
        return bool(self._outlook(plan, self.traffic())[1])

    def _is_news(self, before: Mapping[str, float], after: Mapping[str, float]) -> bool:
        """Whether needs have moved, those of one model or of all together, by more than chance moves them: of many
        models with few requests each, one always seems to have."""

        def has_moved(then: float, now: float) -> bool:
            by_chance = CHANCE * math.sqrt(2.0 * then / self._settings.rates.average_s)  # of two averages
            return abs(now - then) > max(MOVED_ENOUGH * then, by_chance)

        return (
            before.keys() != after.keys()
            or has_moved(sum(before.values()), sum(after.values()))
            or any(has_moved(before[name], after[name]) for name in after)
        )

    def _obstacle(self, *, saves_only: bool) -> str | None:
        """Return what stands against a change now."""
        if self.paused:
            return "changes are paused"
        return self._pace.obstacle(self._now_s, saves_only=saves_only)

    def _want(self, result: Proposal) -> None:
        """Say how many GPUs would carry everything: to the autoscaler, or to the operator of a cluster that cannot
        grow."""
        if result.wanted is None:
            return
        there = Counter(gpu.type for gpu in self._gpus)
        bounds = self._settings.gpus
        if bounds:
            wanted = {
                kind: max(bound.min, min(bound.max, result.wanted.get(kind, 0))) for kind, bound in bounds.items()
            }
            if wanted != self._wanted:
                self._wanted = wanted
                self._decisions.append(WantGpus(wanted))
        missing = {
            kind: count - max(there[kind], bounds[kind].max if kind in bounds else 0)
            for kind, count in result.wanted.items()
        }
        short = {kind: count for kind, count in missing.items() if count > 0}
        if short:
            self.note(journal.gpus_missing(self._now_s, short))

    # --- standby ------------------------------------------------------------------------------------------------------

    @property
    def _wants_standby(self) -> bool:
        return self._settings.standby_pct is not None or self._settings.standby_gpus > 0

    def _keep_on_standby(self, result: Proposal, why: str) -> None:
        """Take the standby processes of what runs; those of a plan that is to come are asked for once it runs."""
        is_kept = result.plan is None or not result.worth.pays
        is_told = result.plan is not None and result.plan.gpulets == self._plan.gpulets  # its rates, right after this
        if not self._wants_standby or not (is_kept or is_told) or self.mode != "act" or self.paused:
            return
        self._standby_of = self._plan.gpulets
        if result.standby == self._standby:
            return
        self._standby = result.standby
        shares = {standby.gpulet.id: f"{standby.gpulet.effective_share_pct:g} %" for standby in self._standby}
        self.note(journal.on_standby(self._now_s, why, shares))
        if is_kept:
            self._decisions.append(Apply(self._plan, why, self._idle_gpulets))

    @property
    def _idle_gpulets(self) -> tuple[Gpulet, ...]:
        return tuple(standby.gpulet for standby in self._standby)

    def _let_standby_take_over(
        self, losing: Sequence[str], slower: Sequence[str], seen: Observation, *, is_news: bool
    ) -> None:
        """Use idle processes where models lose requests or, as batches or news have it, are about to, and that
        helps."""
        short = set(losing)
        if is_news or slower:
            here = self._here(self._plan, self._plan.gpulets)
            found = falling_short(here, self.traffic(), self._slowdowns, self._settings.attainment)
            short |= found if is_news else found & set(slower)
        if not short or self.mode != "act" or self._obstacle(saves_only=False) is not None:
            return
        target = taken_over(self._plan, self._standby, seen.ready, short, self.traffic(), self._slowdowns, self._gpus)
        if target is None:
            return
        before = {gpulet.id for gpulet in self._plan.gpulets}
        names = ", ".join(sorted(gpulet.id for gpulet in target.gpulets if gpulet.id not in before))
        known = [self._reasons[kind] for kind in (Reason.LOST, Reason.SLOW) if kind in self._reasons]
        known += [f"batches of '{name}' take {self._slowdowns[name]:.2f} of their profile" for name in slower]
        known += [f"{', '.join(losing)} loses more requests than allowed"] if losing else []
        why = known[0] if known else f"{', '.join(sorted(short))} has more requests than what runs can carry"
        why = f"{why}: standby {names} takes over"
        self.note(LogLine(self._now_s, Kind.CHANGE, why))
        origin, self._standby_of, self._answered = self._plan, None, None
        self._standby = still_fitting(self._standby, target, self._gpus)
        self._pace.begun(self._now_s)
        self._proving, self._plan, self._asked = None, target, None
        self._reasons.clear()
        self._checked_s = -math.inf  # whether that is enough is asked as soon as it is done
        self._change = ChangeUnderWay(origin, target, target, self._now_s, self._now_s, why, suffered=tuple(short))
        self._decisions.append(Apply(target, why, self._idle_gpulets))

    # --- changing -----------------------------------------------------------------------------------------------------

    def _begin(self, target: Plan, why: str) -> None:
        origin = self._plan
        running = self._here(origin, origin.gpulets)
        losing = self._attainment.lost_part([spec.name for spec in self._workload.models])
        suffered = tuple(name for name, part in losing.items() if part > 1.0 - self._settings.attainment)
        self._pace.begun(self._now_s)
        self._proving = None
        change = ChangeUnderWay(origin, target, running, self._now_s, self._now_s, why, suffered=suffered)
        self._step(change, running)

    def _tell_rates(self, plan: Plan, told: LogLine) -> None:
        """Let the scheduler know that the same gpu-lets are now meant for other rates: no change, nothing to prove."""
        self.note(told)
        if self.mode == "act":
            self._plan = plan
            self._decisions.append(Apply(plan, told.text, self._waiting_beside(plan)))

    def _waiting_beside(self, plan: Plan) -> tuple[Gpulet, ...]:
        """Return the standby processes that can stay beside a plan; the others end."""
        self._standby = still_fitting(self._standby, plan, self._gpus)
        return self._idle_gpulets

    def _step(self, change: ChangeUnderWay, now: Plan) -> None:
        """Apply the next stage of a change, or end it."""
        stage = next_stage(now, change.target, self._gpus, self._rates.mean_rps)
        if stage is None and self._plan.to_data() == change.target.to_data():
            self._end(change)
            return
        stage = stage or change.target  # all of it is there, beside what never came
        is_last = stage is change.target or stage.to_data() == change.target.to_data()
        self._change = replace(change, stage=stage, stage_since_s=self._now_s)
        self._plan = stage
        what = "back to the plan before" if change.is_rollback else change.why
        why = f"{what}{'' if is_last else ' (a stage of the change)'}"
        self._decisions.append(Apply(stage, why, self._waiting_beside(stage)))

    def _go_on(self, seen: Observation) -> None:
        """Look at the stage of the change that is under way."""
        change = self._change
        assert change is not None
        waiting = {gpulet.id for gpulet in change.stage.gpulets} - seen.ready
        before = {gpulet.id for gpulet in change.origin.gpulets}
        broken = {name: why for name, why in seen.broken.items() if name in waiting and name not in before}
        lasts_s = self._now_s - change.stage_since_s
        if broken:
            self._take_back(change, f"gpu-let {', '.join(sorted(broken))} cannot start: {next(iter(broken.values()))}")
        elif not waiting:
            self._remember_duration(change, lasts_s)
            self._step(change, change.stage)
        elif lasts_s > self._settings.change.ready_timeout_s:
            self._take_back(change, f"gpu-let {', '.join(sorted(waiting))} is not ready after {lasts_s:.0f} s")

    def _remember_duration(self, change: ChangeUnderWay, lasts_s: float) -> None:
        if lasts_s <= self._settings.look_s:
            return
        running = {gpulet.id for gpulet in change.origin.gpulets}
        phase = "load_s" if all(gpulet.id in running for gpulet in change.stage.gpulets) else "start_s"
        known_s = getattr(self._durations, phase)
        self._durations = replace(self._durations, **{phase: known_s + FOLLOW * (lasts_s - known_s)})

    def _end(self, change: ChangeUnderWay) -> None:
        self._change = None
        self._attainment.forget()
        self._unsettled_s = self._now_s
        seconds = self._now_s - change.begun_s
        if change.is_rollback:
            self.note(journal.rolled_back(self._now_s, seconds))
            return
        self.note(journal.changed(self._now_s, change.why, seconds))
        self._proving = replace(change, stage_since_s=self._now_s)

    def _take_back_if_worse(self, losing: Sequence[str]) -> None:
        """Roll the last change back where models lose requests since it that did not before, and the plan before would
        carry what is offered now."""
        change = self._proving
        assert change is not None
        new = [name for name in losing if name not in change.suffered]
        if not new or self._outlook(change.origin, self.traffic())[1].keys() & set(new):
            return
        self._proving = None
        parts = listed(self._attainment.lost_part(new), "{:.1%}")
        self._take_back(change, f"since the change more is lost than allowed: {parts}", change.stage.gpulets)

    def _take_back(self, change: ChangeUnderWay, why: str, held: Sequence[Gpulet] | None = None) -> None:
        """Go back to the plan before a change; `held` are gpu-lets that serve now, by default those of that plan."""
        if change.is_rollback:
            self._change = None
            self.note(journal.stuck(self._now_s, why))
            self._reasons[Reason.STUCK] = why
            return
        self._answered = None  # it is asked again once the wait is over
        self.note(journal.taken_back(self._now_s, why, self._pace.failed(self._now_s)))
        before = {gpulet.id for gpulet in change.origin.gpulets}
        if held is None:
            held = [gpulet for gpulet in change.stage.gpulets if gpulet.id in before]
        now = self._here(change.stage, held)
        origin = self._here(change.origin, change.origin.gpulets)
        self._step(ChangeUnderWay(change.stage, origin, now, self._now_s, self._now_s, why, is_rollback=True), now)

    def _here(self, plan: Plan, gpulets: Sequence[Gpulet]) -> Plan:
        """Return a plan with those of some gpu-lets whose GPU is there."""
        here = {gpu.id for gpu in self._gpus}
        return plan.model_copy(update={"gpulets": tuple(gpulet for gpulet in gpulets if gpulet.gpu in here)})


def _moved(before: Mapping[str, float], after: Mapping[str, float], part: float) -> bool:
    return before.keys() != after.keys() or any(
        abs(after[name] - before[name]) > part * max(before[name], 1e-9) for name in after
    )
