"""Threads of a share."""

import pytest

from tenuto.profiles.networks.cpu_share import cpu_threads


@pytest.mark.parametrize(
    ("share", "cores", "threads"), [(50, 2, 1), (100, 2, 2), (1, 2, 1), (25, 16, 4), (None, 8, 8), (70, 2, 1)]
)
def test_a_share_of_cores_is_threads(share: float | None, cores: int, threads: int) -> None:
    assert cpu_threads(share, cores) == threads
