"""Models of a user's own, for tests: what `package.module:factory` may name."""

from __future__ import annotations

import time

import numpy as np
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


class Raising(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such row")


def raising() -> LoadedModel:
    """Return a network that fails whenever it runs."""
    return LoadedModel(Raising(), scale().signature)


def idle() -> LoadedModel:
    """Return a network that computes nothing."""
    return LoadedModel(torch.nn.Identity(), scale().signature)


class Counting(torch.nn.Module):
    """Copies the first number of each row into all of its output, some time after it has noted them in a file."""

    def __init__(self, path: str, width: int, takes_s: float) -> None:
        super().__init__()
        self.path, self.width, self.takes_s = path, width, takes_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.path, "a", encoding="ascii") as file:  # what a process wrote is there although it is killed
            file.write("".join(f"{number:.1f}\n" for number in x[:, 0].tolist()))
        time.sleep(self.takes_s)
        return x[:, :1].repeat(1, self.width)


def counting(*, path: str, takes: int = 1, makes: int = 1, takes_s: float = 0.0) -> LoadedModel:
    """Return a model of vectors whose runs can be counted, request by request."""
    tensors = [(TensorSignature(name, "float32", (width,)),) for name, width in (("x", takes), ("y", makes))]
    return LoadedModel(Counting(path, makes, takes_s), ModelSignature("tensor", *tensors))


class AddTexts(torch.nn.Module):
    """Adds and subtracts whole numbers that are written as text, as `simple_string` of Triton's examples does."""

    def forward(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        read = np.vectorize(int, otypes=[object])
        write = np.vectorize(lambda number: b"%d" % number, otypes=[object])
        return write(read(left) + read(right)), write(read(left) - read(right))


def add_texts() -> LoadedModel:
    """Two inputs and two outputs of sixteen strings of bytes."""
    names = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    tensors = [TensorSignature(name, "bytes", (16,)) for name in names]
    return LoadedModel(AddTexts(), ModelSignature("tensor", tuple(tensors[:2]), tuple(tensors[2:])))


class SameBytes(torch.nn.Module):
    """Returns strings of bytes as they came, with the number that came beside them."""

    def forward(self, texts: np.ndarray, number: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        assert all(type(each) is bytes for each in texts.flat)
        return texts, number


def same_bytes(*, shape: tuple[int, ...] = (2, 2), most_bytes: int = 4096) -> LoadedModel:
    """Strings of bytes and a number, in and out."""
    ways = [
        (TensorSignature(text, "bytes", tuple(shape), most_bytes=most_bytes), TensorSignature(number, "int32", (1,)))
        for text, number in (("x", "n"), ("y", "m"))
    ]
    return LoadedModel(SameBytes(), ModelSignature("tensor", *ways))


def wrong_signature() -> LoadedModel:
    """Promise one output where the model has two."""
    made = scale()
    return LoadedModel(made.module, ModelSignature("tensor", made.signature.inputs, made.signature.outputs[:1]))


def broken() -> LoadedModel:
    """Fails as code of users may."""
    raise KeyError("no weights here")


def not_a_model() -> str:
    """Return something else."""
    return "model"
