"""The common contract of interference models."""

from __future__ import annotations

from lab.tests.baselines.igniter.cases import profiles
from tenuto.placement.interference import NoInterference, Resident
from tenuto.placement.interference.igniter_model import IgniterInterference


def test_neighbours_never_speed_up_and_more_of_them_cost_more() -> None:
    models = profiles().for_type("v100")
    model = IgniterInterference(profiles().hardware("v100"))
    own, other = Resident(models["resnet50"], 8, 25.0), Resident(models["vgg19"], 8, 25.0)
    factors = [model.slowdown(own, [other] * count) for count in range(4)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert factors[3] > 1.05
    assert NoInterference().slowdown(own, [other]) == 1.0
