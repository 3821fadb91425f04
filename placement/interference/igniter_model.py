"""iGniter's analytic performance model: scheduling delay, L2 contention, and frequency loss by power.

Source: Xu et al., "iGniter", arXiv 2211.01713, section 3, equations 1 to 11.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self, get_type_hints

from tenuto.errors import refused
from tenuto.placement.interference.interference_model import Resident


class _Constants:
    """Constants of iGniter's model, by the names that profiles use: a field's annotation, else its own name."""

    __slots__ = ()

    @classmethod
    @functools.cache
    def _names(cls) -> tuple[str, ...]:
        hints = get_type_hints(cls, include_extras=True)
        return tuple(getattr(hint, "__metadata__", (name,))[0] for name, hint in hints.items())

    @classmethod
    def of(cls, values: Mapping[str, float], row: str = "model") -> Self:
        """Read the constants from a profile's coefficients; raises `InvalidInputError` if one is missing."""
        names = cls._names()
        missing = [name for name in names if name not in values]
        if missing:
            cure = "Use a profile with iGniter's coefficients, such as --profiles igniter-v100, or fit them."
            rule = "iGniter's model needs these coefficients"
            raise refused(f"profiles.{row}.coefficients", ", ".join(missing), rule, cure)
        return cls(*(values[name] for name in names))


@dataclass(frozen=True, slots=True)
class Hardware(_Constants):
    """Constants of a GPU type: power in W, frequency in MHz, PCIe in bytes per ms, shares in percent."""

    power_cap_w: Annotated[float, "P_w"]
    idle_power_w: Annotated[float, "p_idle_w"]
    frequency_mhz: Annotated[float, "F_mhz"]
    alpha_f_mhz_per_w: float
    alpha_sch_ms: Annotated[float, "alpha_sch_ms_per_kernel"]
    beta_sch_ms: Annotated[float, "beta_sch_ms_per_kernel"]
    pcie_bytes_per_ms: Annotated[float, "B_pcie_bytes_per_ms"]
    share_unit_pct: Annotated[float, "r_unit_pct"]
    share_max_pct: Annotated[float, "r_max_pct"]

    def extra_delay_ms(self, residents: int) -> float:
        """Return the additional scheduling delay per kernel with that many residents (eq. 6), never negative."""
        return max(0.0, self.alpha_sch_ms * residents + self.beta_sch_ms) if residents > 1 else 0.0

    def speed(self, demand_w: float) -> float:
        """Return f/F for the power that all residents and the idle GPU ask for (eq. 9)."""
        if demand_w <= self.power_cap_w:
            return 1.0
        loss = self.alpha_f_mhz_per_w * (demand_w - self.power_cap_w) / self.frequency_mhz
        return max(0.01, 1.0 + loss)


@dataclass(frozen=True, slots=True)
class ModelConstants(_Constants):
    """Constants of a model; k1..k5 for ms and shares in percent, the alphas per (batch / active ms) * scale."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    kernels: Annotated[float, "n_k"]
    delay_alone_ms: Annotated[float, "k_sch_times_n_k_ms"]
    load_bytes: Annotated[float, "d_load_bytes"]
    feedback_bytes: Annotated[float, "d_feedback_bytes"]
    alpha_power: float
    beta_power_w: float
    alpha_l2_use: Annotated[float, "alpha_cacheutil"]
    beta_l2_use_pct: Annotated[float, "beta_cacheutil_pct"]
    alpha_l2: Annotated[float, "alpha_cache"]

    def work(self, batch_size: int) -> float:
        """Return k1 b^2 + k2 b + k3, in ms times percent."""
        return self.k1 * batch_size * batch_size + self.k2 * batch_size + self.k3

    def active_ms(self, batch_size: int, share_pct: float) -> float:
        """Return the active time of a batch alone on a share (eq. 11)."""
        return self.work(batch_size) / (share_pct + self.k4) + self.k5

    def alone_ms(self, batch_size: int, share_pct: float, hardware: Hardware) -> float:
        """Return t_inf without neighbours: load, scheduling, active time at its own frequency, feedback (eq. 1-11)."""
        load = Load.of(self, batch_size, share_pct)
        return inference_time_ms(self, load, [load], hardware)


@dataclass(frozen=True, slots=True)
class Load:
    """What one resident does to the GPU: active ms per batch, power above idle in W, L2 use in percent."""

    batch_size: int
    active_ms: float
    power_w: float
    l2_pct: float

    @classmethod
    def of(cls, model: ModelConstants, batch_size: int, share_pct: float) -> Load:
        """Return the load; power and L2 use grow with the processing ability 1000 b / k_act in requests per s."""
        active = model.active_ms(batch_size, share_pct)
        ability_rps = 1000.0 * batch_size / active
        return cls(
            batch_size,
            active,
            model.alpha_power * ability_rps + model.beta_power_w,
            max(0.0, model.alpha_l2_use * ability_rps + model.beta_l2_use_pct),
        )


def gpu_time_ms(model: ModelConstants, own: Load, everyone: Sequence[Load], hardware: Hardware) -> float:
    """Return t_gpu of a resident: (scheduling delay + active time) / (f/F), eq. 4 to 10.

    Args:
        everyone: the loads of all residents, `own` among them.
    """
    demand_w = hardware.idle_power_w + sum(load.power_w for load in everyone)
    others_l2_pct = sum(load.l2_pct for load in everyone) - own.l2_pct
    delay_ms = model.delay_alone_ms + hardware.extra_delay_ms(len(everyone)) * model.kernels
    return (delay_ms + own.active_ms * (1.0 + model.alpha_l2 * others_l2_pct)) / hardware.speed(demand_w)


def inference_time_ms(model: ModelConstants, own: Load, everyone: Sequence[Load], hardware: Hardware) -> float:
    """Return t_inf = t_load + t_gpu + t_feedback of a batch in ms (eq. 1 and 3)."""
    copy_ms = own.batch_size * (model.load_bytes + model.feedback_bytes) / hardware.pcie_bytes_per_ms
    return copy_ms + gpu_time_ms(model, own, everyone, hardware)


class IgniterInterference:
    """iGniter's model as a slowdown: t_inf beside the neighbours over t_inf alone; any number of neighbours."""

    def __init__(self, hardware: Mapping[str, float], gpu_type: str = "GPU") -> None:
        """Take a GPU type's hardware coefficients; raises `InvalidInputError` if one is missing."""
        self.hardware = Hardware.of(hardware, gpu_type)

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        """Return the factor; see `InterferenceModel.slowdown`."""
        loads, models = [], []
        for resident in (gpulet, *neighbours):
            models.append(ModelConstants.of(resident.profile.coefficients))
            loads.append(Load.of(models[-1], resident.batch_size, resident.share_pct))
        alone = inference_time_ms(models[0], loads[0], loads[:1], self.hardware)
        return max(1.0, inference_time_ms(models[0], loads[0], loads, self.hardware) / alone)
