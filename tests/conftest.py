"""Settings that have to be in the environment before Ray starts anywhere in the test session."""

import os
from collections.abc import Callable, Iterator

import pytest

MEASURING = "tenuto.profiles.measuring"

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


@pytest.fixture(scope="session")
def worker_server() -> Iterator[Callable[[str], list[str]]]:
    """Fork the profiler's workers from one process instead of importing torch in each; see `forked_workers`."""
    from tests.profiles.forked_workers import forked_workers

    with forked_workers() as arguments:
        yield arguments


@pytest.fixture
def quick_workers(worker_server: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tenuto.profiles.measuring.measure` and `corun` start their processes from the server."""
    monkeypatch.setattr(f"{MEASURING}.measure._WORKER", worker_server("tenuto.profiles.measuring.worker"))
    monkeypatch.setattr(f"{MEASURING}.corun._WORKER", worker_server("tenuto.profiles.measuring.corun_worker"))
