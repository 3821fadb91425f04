"""Small set-ups, those of the tests of our own schedulers."""

from tests.batching.conftest import one_gpu as one_gpu
from tests.batching.conftest import trace_system as trace_system
