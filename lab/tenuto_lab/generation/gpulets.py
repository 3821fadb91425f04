"""Language models on gpu-lets of their own, each with a share: how many replicas, on how many GPUs, beside whom.

A closed form says how many requests per second a gpu-let carries: in the time in which a batch makes its mean outputs,
every sequence of it is also read once, and this time may be a part of what the SLO allows. A model's rate is carried
by as many whole GPUs (or groups of GPUs, as its tensor parallelism) as it fills, and a share of one more. Gpu-lets lie
beside each other where shares and memory allow; a model that fills its GPUs shares none. The load that is carried is
the highest multiple of all rates for which this fits the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto_lab.generation.muxserve import GPU_MIB, RUNTIME_MIB, LanguageModel

SHARES = (30, 40, 50, 60, 70, 80, 90, 100)
"""derived: the shares that were measured."""
PLANNED_PART = 5 / 8
"""fitted on seed 1 of MuxServe's experiment: the part of an SLO that steps may take; the rest is for waiting and
bursts. With 4/8 or 6/8, up to 5 requests in 100 more are late at one of the five peaks, or fewer."""
_MOST_SEQUENCES = 512
"""limit: sequences of one gpu-let."""
_PREFILLED_TOGETHER = 8
"""derived: prompts that a prefill reads at once under load, of the means of the experiment."""
_KV_LEFT = 0.15
"""limit: the part of a unit's memory that has to be left for keys and values."""


@dataclass(frozen=True)
class Gpulet:
    """A share of so many GPUs of a node for one model, and the requests per second that it carries."""

    model: LanguageModel
    gpus: int
    share: float
    rate_rps: float

    @property
    def cost(self) -> float:
        """The GPUs that it takes."""
        return self.gpus * self.share / 100.0

    @property
    def taken_mib(self) -> float:
        """The memory of weights and processes, of all its GPUs together."""
        return self.model.weights_mib + RUNTIME_MIB * self.gpus


@dataclass
class Unit:
    """GPUs of a node with the gpu-lets on them."""

    gpus: int
    gpulets: list[Gpulet]

    @property
    def kv_mib(self) -> float:
        """The memory that is left for keys and values."""
        return GPU_MIB * self.gpus - sum(gpulet.taken_mib for gpulet in self.gpulets)

    def takes(self, gpulet: Gpulet) -> bool:
        """Return whether one more fits: its share, its memory, and no second replica of a model on the same GPUs."""
        return (
            gpulet.gpus == self.gpus
            and sum(other.share for other in self.gpulets) + gpulet.share <= 100.0
            and self.kv_mib - gpulet.taken_mib >= _KV_LEFT * GPU_MIB * self.gpus
            and all(other.model.name != gpulet.model.name for other in self.gpulets)
        )


Bound = Callable[[LanguageModel], float]
HostTime = Callable[[LanguageModel, int], float]


def capacity_rps(model: LanguageModel, gpus: int, share: float, bound_ms: float, host_ms: float) -> float:
    """Return the requests per second that a gpu-let carries so that a request of mean length takes at most `bound_ms`;
    0 where none does. Its memory is its share of the GPUs."""
    room = GPU_MIB * gpus * share / 100.0 - model.weights_mib - RUNTIME_MIB * gpus
    most = min(_MOST_SEQUENCES, int(room / model.kv_mib)) if room > 0 else 0
    if most < 1 or gpus not in model.times:
        return 0.0
    times = model.times[gpus]
    together = _PREFILLED_TOGETHER * model.prompt_tokens
    prefill_ms = times.prefill_ms(together, min(100.0, max(share, model.prefill_share))) / _PREFILLED_TOGETHER
    first_ms = times.prefill_ms(model.prompt_tokens, 100.0)
    best, batch = 0.0, 1
    while batch <= most:
        step_ms = model.decode_ms(gpus, share, batch) + host_ms
        takes_ms = model.output_tokens * step_ms + batch * prefill_ms + first_ms
        if takes_ms <= bound_ms:
            best = max(best, 1000.0 * batch / takes_ms)
        batch += max(1, batch // 16)
    return best


def place(models: Sequence[LanguageModel], gpus: int, bound_ms: Bound, host_ms: HostTime) -> tuple[list[Unit], float]:
    """Return units on so many GPUs and the multiple of all rates that they carry; no unit where the models do not fit.

    `bound_ms(model)`: what the SLO allows a request of mean length; `host_ms(model, gpus)`: what each step takes beside
    the GPU's time.
    """
    options = {
        model.name: [
            Gpulet(model, count, share, rate)
            for count in sorted(model.times)
            for share in SHARES
            if (rate := capacity_rps(model, count, share, PLANNED_PART * bound_ms(model), host_ms(model, count))) > 0
        ]
        for model in models
    }
    low, high, best = 0.01, 100.0, list[Unit]()
    while high / low > 1.01:
        times = (low * high) ** 0.5
        wanted = [_carrying(options[model.name], times * model.rate_rps) for model in models]
        units = [] if any(not gpulets for gpulets in wanted) else _packed([g for gpulets in wanted for g in gpulets])
        if units and sum(unit.gpus for unit in units) <= gpus:
            low, best = times, units
        else:
            high = times
    return best, low


def _carrying(options: Sequence[Gpulet], rate_rps: float) -> list[Gpulet]:
    """Return the gpu-lets that carry a rate for the fewest GPUs: whole ones, and a share for what is left."""
    found: list[Gpulet] = []
    for whole in (option for option in options if option.share == 100):
        count = int(rate_rps // whole.rate_rps)
        left = rate_rps - count * whole.rate_rps
        rest = min((o for o in options if o.rate_rps >= left), key=lambda o: (o.cost, o.gpus), default=whole)
        gpulets = [whole] * count + [rest]
        if not found or sum(g.cost for g in gpulets) < sum(g.cost for g in found) - 1e-9:
            found = gpulets
    return found


def _packed(gpulets: Sequence[Gpulet]) -> list[Unit]:
    """Return units with the gpu-lets, each on the first that takes it, the largest first."""
    units: list[Unit] = []
    for gpulet in sorted(gpulets, key=lambda g: (-g.gpus, -g.share, g.model.name)):
        unit = next((unit for unit in units if unit.takes(gpulet)), None)
        if unit is None:
            units.append(Unit(gpulet.gpus, [gpulet]))
        else:
            unit.gpulets.append(gpulet)
    return units
