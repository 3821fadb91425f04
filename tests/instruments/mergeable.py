"""Networks small enough to be merged in a test."""

from typing import cast

import torch


class Convolutional(torch.nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.head = torch.nn.Linear(8, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = self.second(self.norm(self.first(image)).relu()).relu()
        return cast(torch.Tensor, self.head(found.mean((2, 3))))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(12, 12) for _ in range(3))
        self.head = torch.nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = (self.query(tokens) @ self.key(tokens).transpose(1, 2) / 12**0.5).softmax(-1)
        return cast(torch.Tensor, self.head((weights @ self.value(tokens)).mean(1)))
