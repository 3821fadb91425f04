"""Networks that other people's clients ask for: those of Triton's example repository, by their names there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tenuto.profiles.networks.catalogue import ImageInput, LoadedModel, ModelSignature, TensorSignature

Strings = np.ndarray[Any, Any]
WIDTH = 16  # format: of Triton's `simple`


class SumAndDifference(torch.nn.Module):
    """The sum and the difference of two tensors."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return first + second, first - second


def simple(*, datatype: str = "int32") -> LoadedModel:
    """Return Triton's `simple` or, as int8, `simple_int8`."""
    names = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    inputs, outputs = (tuple(TensorSignature(name, datatype, (WIDTH,)) for name in side) for side in names)
    return LoadedModel(SumAndDifference(), ModelSignature("tensor", inputs, outputs))


class WrittenSumAndDifference(torch.nn.Module):
    """The sum and the difference of two tensors of numbers that are written as texts."""

    def forward(self, first: Strings, second: Strings) -> tuple[Strings, Strings]:
        """Return both as texts."""
        one, other = (np.vectorize(int, otypes=[object])(texts) for texts in (first, second))
        write = np.vectorize(lambda number: str(number).encode(), otypes=[object])
        return write(one + other), write(one - other)


def texts() -> LoadedModel:
    """Return Triton's `simple_string`."""
    names = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    inputs, outputs = (tuple(TensorSignature(name, "bytes", (WIDTH,)) for name in side) for side in names)
    return LoadedModel(WrittenSumAndDifference(), ModelSignature("tensor", inputs, outputs))


def identity() -> LoadedModel:
    """Return Triton's `simple_identity`."""
    inputs, outputs = ((TensorSignature(name, "bytes", (WIDTH,)),) for name in ("INPUT0", "OUTPUT0"))
    return LoadedModel(torch.nn.Identity(), ModelSignature("tensor", inputs, outputs))


class Pooled(torch.nn.Module):
    """A linear layer over a picture of 7 by 7 areas."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(7), torch.nn.Flatten(), torch.nn.Linear(3 * 49, 1000)
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return 1000 scores of each picture."""
        scores: torch.Tensor = self.layers(pictures)
        return scores


def pictures() -> LoadedModel:
    """Return a network with the tensors of Triton's `densenet_onnx`."""
    signature = ModelSignature(
        "image",
        (TensorSignature("data_0", "float32", (3, 224, 224)),),
        (TensorSignature("fc6_1", "float32", (1000,)),),
        image=ImageInput(resize_px=256, crop_px=224),
        labels=tuple(f"class {number}" for number in range(1000)),
    )
    return LoadedModel(Pooled(), signature)
