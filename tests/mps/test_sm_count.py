"""The CUDA driver's answers, from a library that is not there."""

import ctypes
from typing import Any

from tenuto.mps.sm_count import free_memory_mib


class FakeCuda:
    """The calls that tell the memory of a primary context; `active` 0: the process has none."""

    def __init__(self, *, active: int = 1, fails: str = "") -> None:
        self.active, self.fails = active, fails
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 201
            if name == "cuDevicePrimaryCtxGetState":
                arguments[2]._obj.value = self.active
            if name == "cuMemGetInfo_v2":
                arguments[0]._obj.value, arguments[1]._obj.value = 3600 << 20, 16_000 << 20
            return 0

        return call


def ask(library: FakeCuda) -> float | None:
    return free_memory_mib(library)  # type: ignore[arg-type]


def test_the_free_memory_of_the_context_is_told_and_the_context_given_back() -> None:
    library = FakeCuda()
    assert ask(library) == 3600.0
    assert library.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_no_context_is_made_for_a_process_that_has_none() -> None:
    library = FakeCuda(active=0)
    assert ask(library) is None
    assert "cuDevicePrimaryCtxRetain" not in library.calls


def test_a_call_that_fails_tells_nothing_and_gives_back_what_was_taken() -> None:
    library = FakeCuda(fails="cuMemGetInfo_v2")
    assert ask(library) is None
    assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert free_memory_mib(ctypes.CDLL(None)) is None  # a library without these calls
