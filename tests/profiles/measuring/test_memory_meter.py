"""The resident set as a meter of memory."""

import subprocess
import sys

import pytest

from tenuto.profiles.measuring.memory_meter import ResidentMemory


def test_resident_memory_sees_what_is_allocated_and_released() -> None:
    if ResidentMemory().peak_mib() is None:
        pytest.skip("the kernel reports no resident set here")
    # A process of its own: here, freed memory of other tests would be used again and not count as growth.
    program = """
import numpy as np
from tenuto.profiles.measuring.memory_meter import ResidentMemory
meter = ResidentMemory()
meter.reset()
block = np.ones(40 * 2**20 // 8)
grown = meter.peak_mib()
del block
meter.reset()
print(grown, meter.peak_mib())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    grown, after = (float(word) for word in done.stdout.split())
    assert 38 <= grown <= 60
    assert after < 20
