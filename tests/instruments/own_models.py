"""Models of a user's own, for tests: what `package.module:factory` may name."""

from __future__ import annotations

import torch

from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature


class Scale(torch.nn.Module):
    """y = factor * x, and the sum of each row."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.factor, x.sum(dim=1)


def scale(*, factor: float = 2.0, width: int = 4, weights_path: str | None = None) -> LoadedModel:
    """Return the model; `weights_path` is a text file with the factor."""
    if weights_path is not None:
        with open(weights_path, encoding="utf-8") as file:
            factor = float(file.read())
    signature = ModelSignature(
        kind="tensor",
        inputs=(TensorSignature("x", "float32", (width,)),),
        outputs=(TensorSignature("y", "float32", (width,)), TensorSignature("total", "float32", ())),
    )
    return LoadedModel(Scale(factor), signature)


def triple(*, width: int = 4) -> LoadedModel:
    """A second model, where two are needed."""
    return scale(factor=3.0, width=width)


def wrong_signature() -> LoadedModel:
    """Promise one output where the model has two."""
    made = scale()
    return LoadedModel(made.module, ModelSignature("tensor", made.signature.inputs, made.signature.outputs[:1]))


def not_a_model() -> str:
    """Return something else."""
    return "model"
