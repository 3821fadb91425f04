"""Random inputs."""

from tenuto.profiles.networks.inputs import random_inputs
from tenuto.profiles.networks.models import build
from tests.instruments.small_networks import SMALL


def test_inputs_are_seeded_and_within_range() -> None:
    signature = build("bert", options=SMALL["bert"]).signature
    first, again = random_inputs(signature, 3), random_inputs(signature, 3)
    assert (first["input_ids"] == again["input_ids"]).all()
    assert first["input_ids"].max() < 1000
    assert first["attention_mask"].all()
