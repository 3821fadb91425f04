"""The option `compile`: which sizes are compiled, and that a padded compiled batch answers as a plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.torch_runner import RunOptions, TorchRunner, fixed_sizes, split_options


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_powers_of_two_and_the_largest_are_compiled(largest: int, sizes: tuple[int, ...]) -> None:
    assert fixed_sizes(largest) == sizes


def test_only_fixed_sizes_reach_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compile_(module: torch.nn.Module, *, dynamic: bool) -> Any:
        assert dynamic is False

        def call(x: torch.Tensor) -> Any:
            seen.append(len(x))
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    signature = ModelSignature(
        kind="tensor", inputs=(TensorSignature("x", "float32", (4,)),), outputs=(TensorSignature("y", "float32", (2,)),)
    )
    module = torch.nn.Linear(4, 2).eval()
    runner = TorchRunner(LoadedModel(module, signature), "cpu", RunOptions(compile=True), batch_sizes=range(1, 7))
    for size in range(1, 7):
        x = np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)
        with torch.inference_mode():
            plain = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(runner.run({"x": x}, size)["y"], plain, rtol=1e-5, atol=1e-6)
    assert seen == [1, 2, 4, 4, 6, 6]


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(InvalidInputError, match="compile"):
        split_options({"compile": "sometimes"}, "options of m")
