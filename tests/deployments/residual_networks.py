"""Small residual networks, one fine-tuned from the other: what a live gpu-let merges."""

from __future__ import annotations

from typing import cast

import torch

from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature

SIDE, CLASSES = 16, 7


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(width)
        self.second = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, (x + self.second(self.norm(self.first(x)).relu())).relu())


class Residual(torch.nn.Module):
    def __init__(self, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, width, 3, padding=1)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.blocks(self.stem(image)).mean((2, 3))))


def _made(changed: tuple[str, ...]) -> LoadedModel:
    torch.manual_seed(0)
    module = Residual().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(changed):
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    inputs = (TensorSignature("image", "float32", (3, SIDE, SIDE)),)
    return LoadedModel(module, ModelSignature("tensor", inputs, (TensorSignature("logits", "float32", (CLASSES,)),)))


def base() -> LoadedModel:
    """Return the network others are fine-tuned from."""
    return _made(())


def tuned() -> LoadedModel:
    """Return it with a new last block and head."""
    return _made(("blocks.2", "head"))


def stranger() -> LoadedModel:
    """Return the same graph with no weight in common."""
    return _made(("stem", "blocks", "head"))
