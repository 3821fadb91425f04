"""The requests that have no answer yet, and the models that they ask for. Each request ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenuto.batching.core.scheduler import Drop, Refusal
from tenuto.batching.core.system import INF, System
from tenuto.deployments.dispatch.counters import Counters, ModelCounters
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.wire.answers import Executed, Loop, Refused
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature

FULL_S = 10.0  # pace: until a client asks again that has met a full queue of offline requests
_TOO_LATE = "the deadline could not be met; it was not executed. Lower the rate, raise the SLO or add GPUs"


@dataclass(slots=True)
class AskedModel:
    """A model that can be asked for, or one size class of it: its index and its program's index in the core, its SLO,
    the planned latency of a request alone, and its largest planned batch."""

    index: int
    program: int
    slo_ms: float
    alone_ms: float
    batch_size: int
    counters: ModelCounters


class SizedModel(NamedTuple):
    """A model with size classes: its place among the models of the core's system that clients know, the names of its
    sizes in the order of the workload, and its classes by their index in the core."""

    system: System
    place: int
    names: tuple[str, ...]
    classes: dict[int, AskedModel]


class OpenRequests:
    """Who is in here is told how the request ends, and leaves."""

    def __init__(
        self,
        accounts: Counters,
        clock_ms: Callable[[], float],
        signature: Callable[[str], ModelSignature | None] = lambda _model: None,
    ) -> None:
        """Count in `accounts` what ends, at times of the clock. `signature`: of a model, once it is known."""
        self._accounts, self._clock_ms, self._signature = accounts, clock_ms, signature
        self._open: dict[int, Request] = {}
        self.models: dict[str, AskedModel] = {}  # of one with size classes the largest
        self._by_size: dict[str, SizedModel] = {}

    def follow(self, plan: Plan, system: System) -> None:
        """Let the models of this plan be asked for. What waits for others is refused."""
        alone_ms = _alone_ms(system)
        sizes: dict[str, int] = {}
        for planned in (program for gpulet in plan.gpulets for program in gpulet.programs):
            sizes |= {name: max(planned.batch_size, sizes.get(name, 1)) for name in planned.models}
        self.models, self._by_size = {}, {}
        for place, (spec, classes) in enumerate(zip(plan.models, system.classes_of, strict=True)):
            counters = self._accounts.counters[spec.name]
            counters.follow(spec, {index: own for index in classes if (own := system.models[index].sizes)})
            size = sizes.get(spec.name, 1)
            by_index = {
                index: AskedModel(index, system.program_of[index], spec.own_slo_ms, alone_ms[index], size, counters)
                for index in classes
            }
            self.models[spec.name] = by_index[classes[-1]]
            if len(classes) > 1:
                self._by_size[spec.name] = SizedModel(system, place, tuple(spec.sizes), by_index)
        for request in list(self._open.values()):
            if request.name in self.models:
                served = self.find(request.name, request.sizes)
                if served is not None:
                    request.model = served.index
                elif request.is_waiting:
                    self.refuse_larger(request)
            elif request.is_waiting:
                self.refuse_removed(request)

    def find(self, model: str, sizes: tuple[int, ...]) -> AskedModel | None:
        """Return a model, or its size class for a request of these sizes, in the order of the model's signature; None:
        the request is larger than every class.

        Raises:
            KeyError: the plan has no such model.
        """
        sized = self._by_size.get(model)
        if sized is None or not sizes:
            return self.models[model]
        signature = self._signature(model)
        named = dict(zip(sized.names if signature is None else signature.sizes, sizes, strict=False))
        if not named.keys() >= {*sized.names}:
            return self.models[model]  # its network has other sizes than its profile
        return sized.classes.get(sized.system.place_of(sized.place, tuple(named[name] for name in sized.names)))

    def add(self, request: Request) -> None:
        """Keep a request until it has its answer."""
        self._open[request.id] = request

    def those(self, ids: Sequence[int]) -> list[Request]:
        """Return the requests with these ids that are open still."""
        opened = self._open
        return [request for number in ids if (request := opened.get(number)) is not None]

    def waiting(self) -> list[Request]:
        """Return those that wait for a batch."""
        return [request for request in self._open.values() if request.is_waiting]

    def count_waiting(self, *, offline: bool = False) -> dict[str, int]:
        """Return how many of each model wait for a batch, of those that are `offline` or of all others."""
        waiting = Counter(request.name for request in self.waiting() if request.offline == offline)
        return {name: waiting[name] for name in self.models}

    def is_open(self, request: Request) -> bool:
        """Whether it has no answer yet."""
        return request.id in self._open

    # --- ends -------------------------------------------------------------------------------------------------------

    def cancel(self, request: Request) -> bool:
        """Forget a request whose client went away. False: it was answered before."""
        if self._open.pop(request.id, None) is None:
            return False
        self._accounts.cancelled(request)
        return True

    def executed(self, requests: list[Request], executed: Executed) -> None:
        """Answer the requests of one model in a batch. Requests whose client went away meanwhile are not counted."""
        opened = self._open
        rows = [(request, row) for row, request in enumerate(requests) if opened.pop(request.id, None) is not None]
        if not rows:
            return
        ran = [request for request, _ in rows]
        offline = [request for request in ran if request.offline]
        if offline and len(offline) < len(ran):
            ran = [request for request in ran if not request.offline]
            self._accounts.executed(offline, executed, self._clock_ms())
        self._accounts.executed(ran, executed, self._clock_ms())
        for request, row in rows:
            request.asker.executed(request, executed, row)

    def refuse(self, request: Request, refused: Refused) -> None:
        """End an open request with a refusal; does nothing for a request that is no longer open."""
        if self._open.pop(request.id, None) is not None:
            self._accounts.refused(request, refused, self._clock_ms())
            request.asker.refused(request, refused)

    def reject(self, request: Request, rule: Rule, reason: str) -> None:
        """Refuse a request because too many others of its model wait."""
        # Pace: at least so long until a client asks again.
        wait_s = FULL_S if request.offline else max(0.1, self.models[request.name].slo_ms / 1000.0)
        self.refuse(request, Refused(Outcome.REJECTED, f"{reason}; retry in {wait_s:g} s", wait_s, rule=rule))

    def refuse_larger(self, request: Request) -> None:
        """Refuse a request that is larger than every size class of its model."""
        reason = (
            f"'{request.name}' is not profiled for requests of this size ({', '.join(map(str, request.sizes))}); "
            "profile it with larger --sizes and plan it again"
        )
        self.refuse(request, Refused(Outcome.REJECTED, reason, rule=Rule.SIZE))

    def refuse_removed(self, request: Request) -> None:
        """Refuse a request whose model the plan no longer has."""
        self.refuse(request, Refused(Outcome.FAILED, f"'{request.name}' was removed from the plan"))

    def expire(self, request: Request, rule: Rule) -> None:
        """Refuse a request whose deadline cannot be met. When it could be met but for the reserve, name the margin;
        when not even an empty gpu-let could meet it, asking again does not help."""
        served = self.models.get(request.name)
        alone_ms = served.alone_ms if served is not None else 0.0
        loop = Loop.MARGIN if self._clock_ms() + alone_ms <= request.deadline_ms else Loop.NONE
        again_s = 1.0 if request.arrived_ms + alone_ms <= request.deadline_ms else None
        self.refuse(request, Refused(Outcome.EXPIRED, _TOO_LATE, again_s, rule=rule, loop=loop))

    def give_up(self, refusals: Sequence[Refusal]) -> None:
        """Refuse what the scheduler gave up."""
        for refusal in refusals:
            for request in self.those(refusal.request_ids):
                if isinstance(refusal, Drop):
                    self.expire(request, Rule.CUT)
                else:
                    reason = f"'{request.name}' exceeds the rate it is planned for. Send less, or plan for more"
                    wait_s = refusal.retry_after_ms / 1000.0
                    refused = Refused(Outcome.REJECTED, reason, wait_s, rule=Rule.BEYOND_PLAN, loop=Loop.LOSSES)
                    self.refuse(request, refused)

    def close(self) -> None:
        """Answer every request as failed."""
        for request in list(self._open.values()):
            self.refuse(request, Refused(Outcome.FAILED, "the server is shutting down; send the request again", 1.0))


def _alone_ms(system: System) -> list[float]:
    """Return the planned latency of a batch of one on the fastest gpu-let, by model; 0 for models that none hosts."""
    fastest: dict[int, float] = {}
    for hosts in system.distinct_hosts():
        for program, host in hosts.items():
            fastest[program] = min(fastest.get(program, INF), host.planned_batch_ms(1))
    return [fastest.get(program, 0.0) for program in system.program_of]
