"""Hooks of a user's own, for tests: what the option `hooks: package.module:factory` may name."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature


class Numbers:
    """A JSON list of numbers in, the sum of each output out. A body that is a word does what it says."""

    def __init__(self, signature: ModelSignature) -> None:
        (self.input,) = signature.inputs

    def example(self) -> bytes:
        return json.dumps([0.5] * self.input.shape[0]).encode()

    def preprocess(self, body: bytes) -> dict[str, Any]:
        match body:
            case b"hang":
                time.sleep(3600.0)
            case b"spin":
                while True:
                    pass
            case b"crash":
                os._exit(9)
            case b"leave":
                raise SystemExit("a secret")
            case b"shape":
                return {self.input.name: np.zeros(self.input.shape[0] + 1, np.float32)}
            case b"bug":
                raise ValueError("a secret")
            case b"start":
                left = subprocess.Popen(["sleep", "3600"])  # nobody waits for it
                return {self.input.name: np.full(self.input.shape, left.pid, np.float32)}
            case b"print":
                print("printed by a hook")  # must not come between the answers
                return {self.input.name: np.full(self.input.shape, os.getpid() % 1000, np.float32)}
        try:
            return {self.input.name: np.asarray(json.loads(body), np.float64)}
        except ValueError as error:
            raise InvalidInputError(f"the body is no list of {self.input.shape[0]} numbers. Send JSON.") from error

    def postprocess(self, outputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        sums = {name: values.sum() for name, values in outputs.items()}
        if any(total < 0 for total in sums.values()):
            time.sleep(3600.0)
        if any(total > 1e6 for total in sums.values()):
            raise ValueError("a secret")
        return {"sums": sums}


class Named(Numbers):
    """The same, with the body that the numbers came in."""

    def postprocess(self, outputs: Mapping[str, np.ndarray], request: bytes) -> dict[str, Any]:  # type: ignore[override]
        return {**super().postprocess(outputs), "request": request.decode()}


class Halves(Numbers):
    """Has an example that it does not fit itself."""

    def example(self) -> bytes:
        return b"shape"


def half(signature: ModelSignature) -> object:
    """Return what lacks a method."""
    del signature
    return object()


def broken(signature: ModelSignature) -> Numbers:
    """Fail."""
    raise KeyError("weights")
