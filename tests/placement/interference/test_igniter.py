"""The fits of iGniter's hardware coefficients against the published ones, and the models' common contract."""

from __future__ import annotations

import pytest

from tenuto.placement.interference import NoInterference, Resident
from tenuto.placement.interference.fitting import demand_from_power, frequency_slope, scheduling_line
from tenuto.placement.interference.igniter import IgniterInterference
from tests.placement.policies.igniter.cases import profiles
from tests.placement.published import facts


def test_published_hardware_coefficients_come_out() -> None:
    raw = facts("igniter_v100_raw_profile")["hardware"]
    frequency, power = raw["frequency_mhz_1to5_vgg19"], raw["power_w_1to5_vgg19"]
    top, cap = raw["max_frequency_mhz"], raw["max_power_w"]
    demand = [demand_from_power(power, cap, count) for count in range(1, 6)]
    delays = raw["sched_delay_per_kernel_ms_1to5_vgg19"]
    alpha, beta = scheduling_line(delays, [value / top for value in frequency])
    assert frequency_slope(demand, frequency, cap, top) == pytest.approx(-1.025414, rel=1e-4)
    assert alpha == pytest.approx(0.004750653, rel=1e-4)
    assert beta == pytest.approx(-0.009022426, rel=1e-4)


def test_neighbours_never_speed_up_and_more_of_them_cost_more() -> None:
    models = profiles().for_type("v100")
    model = IgniterInterference(profiles().hardware("v100"))
    own, other = Resident(models["resnet50"], 8, 25.0), Resident(models["vgg19"], 8, 25.0)
    factors = [model.slowdown(own, [other] * count) for count in range(4)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert factors[3] > 1.05
    assert NoInterference().slowdown(own, [other]) == 1.0
