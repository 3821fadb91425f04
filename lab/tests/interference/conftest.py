"""The profiler on the GPU of virtual time, as the machine's tests run it."""

from tests.cli.test_profile_on_gpu import run, verb

__all__ = ["run", "verb"]
