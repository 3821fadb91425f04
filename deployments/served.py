"""A model as the gateway sees it: its tensors, and how a raw image or text becomes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.deployments.answers import OutputTensor
from tenuto.deployments.oip import BadRequestError, TensorSpec

__all__ = ["ServedModel"]


@dataclass(frozen=True)
class ServedModel:
    """Built from what a gpu-let reports after loading the model. `raw` is the signature as plain data."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    labels: tuple[str, ...]
    raw: Mapping[str, Any]

    @classmethod
    def from_data(cls, raw: Mapping[str, Any]) -> ServedModel:
        """Build from the plain data of a gpu-let's description."""
        return cls(_specs(raw["inputs"]), _specs(raw["outputs"]), str(raw.get("platform", "tenuto")),
                   tuple(raw.get("labels", ())), raw)

    def preprocess(self, body: bytes) -> list[memoryview]:
        raise BadRequestError("not yet")

    def postprocess(self, outputs: Sequence[OutputTensor]) -> list[dict[str, Any]]:
        raise BadRequestError("not yet")


def _specs(raw: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), t.get("below")) for t in raw)
