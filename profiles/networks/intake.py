"""Converts a batch into the type and layout of its network, and normalises pixels, in one kernel.

torch is imported on use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenuto.profiles.networks.catalogue import ImageInput

if TYPE_CHECKING:
    import torch


class Intake:
    """The first step of a network. Integers keep their type, except the pixels of pictures."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        channels_last: bool = False,
        pictures: ImageInput | None = None,
    ) -> None:
        """Set the type and layout of the network.

        Args:
            dtype: the type of all inputs that are no integers. float64 becomes half precision, but no float32.
            device: the device of batches.
            channels_last: whether tensors of four dimensions get that layout.
            pictures: how uint8 pixels are normalised; None: uint8 is a type like others.
        """
        import torch

        self._torch = torch
        self._dtype = dtype
        self._device = device
        self._is_channels_last = channels_last
        self._pictures: tuple[torch.Tensor, torch.Tensor] | None = None
        if pictures is not None:
            mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (pictures.mean, pictures.std))
            self._pictures = (-mean / std).to(device), (1.0 / (255.0 * std)).to(device)  # format: values of a pixel

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the batch as the network takes it. A tensor that has the right form already is not copied; numpy's
        arrays of bytes stay as they are."""
        return [self._as_wanted(each) if isinstance(each, self._torch.Tensor) else each for each in tensors]

    def _as_wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        is_other = self._dtype_of(tensor) != tensor.dtype
        if not is_other and (not self._has_layout(tensor) or tensor.is_contiguous(memory_format=self._layout(tensor))):
            return tensor
        return self.write(self._empty(tensor, tensor.shape), tensor)

    def room(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Return memory for a batch of `rows` rows with the shape of the rows of `like`."""
        return self._empty(like, (rows, *like.shape[1:]))

    def _empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return self._torch.empty(
            shape, dtype=self._dtype_of(like), device=self._device, memory_format=self._layout(like)
        )

    def write(self, room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Write a batch into its memory, on the current stream; return it."""
        if self._is_pixels(tensor) and self._pictures is not None:
            shift, scale = self._pictures
            # (x / 255 - mean) / std in fp32, rounded once to the network's type.
            self._torch.addcmul(shift, scale, tensor, out=room)
        else:
            room.copy_(tensor, non_blocking=True)
        return room

    def _is_pixels(self, tensor: torch.Tensor) -> bool:
        return self._pictures is not None and tensor.dtype == self._torch.uint8

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        if self._is_pixels(tensor):
            return self._dtype
        return network_dtype(tensor.dtype, self._dtype)

    def _has_layout(self, tensor: torch.Tensor) -> bool:
        return self._is_channels_last and tensor.dim() == 4

    def _layout(self, tensor: torch.Tensor) -> Any:
        return self._torch.channels_last if self._has_layout(tensor) else self._torch.contiguous_format


def network_dtype(came: torch.dtype, chosen: torch.dtype) -> torch.dtype:
    """Return the type in which a network of type `chosen` takes a tensor."""
    import torch

    keeps = not came.is_floating_point or (came, chosen) == (torch.float64, torch.float32)
    return came if keeps else chosen
