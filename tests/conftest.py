"""Settings that have to be in the environment before Ray starts anywhere in the test session."""

import os

import pytest

# Without this a local Ray writes a token into the home folder, which later locks out a plain `ray start` and `serve
# deploy`.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `unit` whatever needs neither Ray nor a GPU."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("ray", "gpu")):
            item.add_marker(pytest.mark.unit)
