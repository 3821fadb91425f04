"""Settings of all tests that run networks."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny networks gain nothing from threads, and lose much on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ compiler is asked for the kernels alone: not for which vector instructions it knows, nor for the headers
    of later ones; nor by processes that import torch for it."""
    import torch._inductor.config as inductor

    for owner, key, value in (
        (inductor.cpp, "vec_isa_ok", False),
        (inductor, "cpp_cache_precompile_headers", False),
        (inductor.aot_inductor, "precompile_headers", False),
        (inductor, "compile_threads", 1),
    ):
        monkeypatch.setattr(owner, key, value)
