"""Networks for pictures beside torchvision's classifiers: its detectors, called with one tensor, and LeNet.

Importing this module imports torch; only `tenuto.profiles.networks.models` does so, when a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tenuto.profiles.networks.torchvision_import import import_detection


def lenet(num_classes: int) -> nn.Module:
    """Return LeNet-5 for pictures of 32 x 32 pixels."""
    return nn.Sequential(
        _Grey(),
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


class _Grey(nn.Module):
    """Makes one channel of three."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.mean(dim=1, keepdim=True)


def make_detector(name: str, config: dict[str, Any]) -> nn.Module:
    """Return a detector of torchvision; nothing is downloaded."""
    made: nn.Module = getattr(import_detection(), name)(weights=None, weights_backbone=None, **config)
    return made


class Detector(nn.Module):
    """Calls a detector of torchvision with normalised squares. A row has `most` boxes: behind the last, zeros."""

    def __init__(self, network: nn.Module, most: int) -> None:
        super().__init__()
        self.network: Any = network
        self.most = most
        self._is_ssd = hasattr(network, "anchor_generator")  # the others have a network for proposals

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from torchvision.models.detection.image_list import ImageList

        rows, _, height, width = image.shape
        images = ImageList(image, [(height, width)] * rows)
        features = self.network.backbone(image)
        if self._is_ssd:
            maps = list(features.values())
            found = self.network.postprocess_detections(
                self.network.head(maps), self.network.anchor_generator(images, maps), images.image_sizes
            )
        else:
            proposals, _ = self.network.rpn(images, features)
            found, _ = self.network.roi_heads(features, proposals, images.image_sizes)
        boxes = image.new_zeros((rows, self.most, 4))
        labels = torch.zeros((rows, self.most), dtype=torch.int64, device=image.device)
        scores = image.new_zeros((rows, self.most))
        for row, each in enumerate(found):
            count = len(each["scores"])
            boxes[row, :count], labels[row, :count], scores[row, :count] = each["boxes"], each["labels"], each["scores"]
        return boxes, labels, scores
