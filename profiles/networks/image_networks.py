"""Image classifiers that take pixels and normalise them on the device. Imports torch."""

from __future__ import annotations

import torch

from tenuto.profiles.networks.catalogue import ImageInput

__all__ = ["normalising"]


class _Normalising(torch.nn.Module):
    """(x / 255 - mean) / std as x * scale + shift, in the type of the network that follows."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, network: torch.nn.Module, image: ImageInput) -> None:
        super().__init__()
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (image.mean, image.std))
        self.network = network
        self.register_buffer("scale", 1.0 / (255.0 * std))
        self.register_buffer("shift", -mean / std)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.network(pixels.to(self.scale.dtype) * self.scale + self.shift)
        return answer


def normalising(network: torch.nn.Module, image: ImageInput) -> torch.nn.Module:
    """Return the network with the normalisation of `image` in front: uint8 pixels (CHW) in."""
    return _Normalising(network, image)
