"""What one test does to Serve's logger, which is ours too, no other test sees."""

import logging

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_serve_is_imported_and_quieted() -> None:
    import ray.serve  # noqa: F401  # keeps what is logged to itself from now on

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def test_what_is_logged_afterwards_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ray.serve").warning("a warning")
    assert "a warning" in caplog.text
