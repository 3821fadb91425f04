"""Wrong keys: how long the answer to one waits."""

import logging

import pytest

from tenuto.deployments.security import guesses as module
from tenuto.deployments.security.guesses import MOST_ADDRESSES, Guesses


def test_each_wrong_key_of_an_address_waits_longer_until_it_is_forgotten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("tests.guesses")  # Serve, where it was imported, takes its own aside
    monkeypatch.setattr(module, "logger", logger)
    caplog.set_level(logging.WARNING, logger=logger.name)
    guesses = Guesses()
    waits = [guesses.wait_s("10.0.0.1", 1.0) for _ in range(40)]
    assert waits[:5] == [0.0] * 5
    assert waits[5:10] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert set(waits[10:]) == {2.0}
    assert caplog.text.count("10.0.0.1") == 1
    assert guesses.wait_s("10.0.0.2", 1.0) == 0.0  # others are not
    assert guesses.wait_s("10.0.0.1", 1000.0) == 0.0
    assert guesses.total == 42


def test_a_whole_network_of_ipv6_is_one_client() -> None:
    guesses = Guesses()
    waits = [guesses.wait_s(f"2001:db8::{number:x}", 0.0) for number in range(7)]
    assert waits[6] > 0.0
    assert guesses.wait_s("2001:db8:0:1::1", 0.0) == 0.0


def test_no_more_is_kept_however_many_addresses_guess() -> None:
    guesses = Guesses()
    assert [guesses.wait_s("192.0.2.1", 0.0) > 0.0 for _ in range(7)][-1]
    for number in range(MOST_ADDRESSES):
        guesses.wait_s(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert guesses.wait_s("192.0.2.1", 0.0) == 0.0  # the first one is forgotten
