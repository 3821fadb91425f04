"""`torch.compile` for real, on the CPU: equal results, and what a machine without a C++ compiler is told."""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.compiled import CompiledModule
from tenuto.profiles.networks.inputs import as_blocks
from tenuto.profiles.networks.model_options import ModelOptions, RunOptions, compiled_sizes
from tenuto.profiles.networks.programs import lone_program

SIGNATURE = ModelSignature(
    kind="tensor", inputs=(TensorSignature("x", "float32", (8,)),), outputs=(TensorSignature("y", "float32", (3,)),)
)
COMPILER = next(
    (name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and shutil.which(name)), None
)

# Inductor leaves deprecated calls of torch itself and of the standard library to be warned about.
pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()


@pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler and there is none")
@pytest.mark.usefixtures("kernels_alone")
def test_a_network_that_was_really_compiled_answers_as_the_plain_one() -> None:
    module = network()
    # One size, which takes the compiler seconds; what happens with several is below.
    runner = lone_program("m", LoadedModel(module, SIGNATURE), RunOptions(compile=True), [2])
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    with torch.inference_mode():
        plain = module(torch.from_numpy(x)).numpy()
    found = runner.run({"m": as_blocks({"x": x})}, {"m": 2})["m"]["y"]
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] >= 1  # it did not fall back to the plain module


def test_no_compiler_is_an_environment_fault_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    monkeypatch.setattr(inductor.cpp, "cxx", ("/nonexistent/c++",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    runner = lone_program("tiny", LoadedModel(network(), SIGNATURE), RunOptions(compile=True), [1])
    with pytest.raises(EnvironmentFaultError, match=r"'tiny' cannot be compiled.*compile: true") as caught:
        runner.warm_up(1)
    assert "\n" not in str(caught.value)
    torch._dynamo.reset()


def test_an_error_of_the_model_itself_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(module: torch.nn.Module, *, dynamic: bool) -> torch.nn.Module:
        del dynamic
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(RuntimeError, match="shapes"):
        CompiledModule(network(), "tiny", shapes=1)(torch.zeros(1, 9))


def test_compile_and_graphs_exclude_each_other_and_graphs_need_a_gpu() -> None:
    with pytest.raises(InvalidInputError, match=r"both 'compile' and 'cuda_graphs'.*Keep one"):
        ModelOptions.parse({"compile": True, "cuda_graphs": True}, "options of m")
    with pytest.raises(InvalidInputError, match=r"options of m: cuda_graphs.*need an NVIDIA GPU"):
        lone_program("m", LoadedModel(network(), SIGNATURE), RunOptions(cuda_graphs=True))


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_powers_of_two_and_the_largest_are_compiled(largest: int, sizes: tuple[int, ...]) -> None:
    assert compiled_sizes(largest) == sizes


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
    runner = lone_program("m", LoadedModel(module, signature), RunOptions(compile=True), range(1, 7))
    for size in range(1, 7):
        x = np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)
        with torch.inference_mode():
            plain = module(torch.from_numpy(x)).numpy()
        found = runner.run({"m": as_blocks({"x": x})}, {"m": size})["m"]["y"]
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
    assert seen == [1, 2, 4, 4, 6, 6]
