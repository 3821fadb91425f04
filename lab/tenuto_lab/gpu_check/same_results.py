"""Compares answers of a device with those of a plain forward pass on the processor: for batches streamed two deep, run
eagerly, as CUDA graphs, with channels last, and from pixels. A step of `scripts/gpu_check`, on a small network with
random weights.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.profiles.networks.catalogue import LoadedModel
from tenuto.profiles.networks.device import cuda_streams
from tenuto.profiles.networks.inputs import Arrays, as_blocks
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.preprocess import normalised
from tenuto.profiles.networks.programs import lone_program
from tenuto.profiles.networks.runner import StagedBatch
from tenuto_lab.gpu_check.results import Results, in_words

NETWORK: dict[str, Any] = {"image_size": 32, "config": {"width_mult": 0.25}}  # of mobilenet_v2
EXACT: dict[str, Any] = {"dtype": "fp32", "tf32": False}  # with random weights this network magnifies bf16's rounding
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False, "channels_last": False},
    "cuda graphs": {"cuda_graphs": True},
    "channels last": {"cuda_graphs": True, "channels_last": True},
    "pixels": {"uint8_input": True},
}
ROWS, BATCHES = 4, 6
LARGEST_DIFFERENCE = 0.02  # of the largest logit; fitted: fp32 kernels of cuDNN differ from oneDNN's by a tenth of it


def difference(way: str, device: str) -> float:
    """Return by how much a device's answers differ from the processor's, as a part of the largest logit.

    Args:
        way: one of `WAYS`.
        device: `cuda` or `cpu`; without CUDA graphs on the latter.
    """
    import torch

    pixels = [np.random.default_rng(n).integers(0, 256, (ROWS, 3, 32, 32), dtype=np.uint8) for n in range(BATCHES)]
    loaded = _network()
    assert loaded.signature.image is not None
    pictures = [normalised(given, loaded.signature.image) for given in pixels]
    with torch.inference_mode():
        expected = [loaded.module(torch.from_numpy(given)).numpy() for given in pictures]
    given = pixels if way == "pixels" else pictures
    options = {key: value for key, value in WAYS[way].items() if device == "cuda" or key != "cuda_graphs"}
    found = _streamed([{"image": images} for images in given], RunOptions(**EXACT, **options), device)
    return max(
        float(np.abs(one["logits"] - plain).max() / np.abs(plain).max())
        for one, plain in zip(found, expected, strict=True)
    )


def _network() -> LoadedModel:
    return build("mobilenet_v2", options=NETWORK)


def _streamed(given: Sequence[Arrays], options: RunOptions, device: str) -> list[Arrays]:
    """Return the answers; each batch is staged and launched before the one before is finished."""
    runner = lone_program("m", _network(), options, [ROWS], cuda_streams(device, overlapping=True))
    runner.warm_up(1)
    under_way: deque[StagedBatch] = deque()
    answers = []
    for arrays in given:
        under_way.append(runner.stage({"m": as_blocks(arrays)}, {"m": ROWS}))
        runner.launch(under_way[-1])
        if len(under_way) == 2:
            answers += runner.finish(under_way.popleft())[0]["m"]
    return [*answers, *(part for rest in under_way for part in runner.finish(rest)[0]["m"])]


def main(arguments: Sequence[str] | None = None, *, measure: Callable[[str, str], float] = difference) -> int:
    """Write `same-results.json`; return 1 if a way failed or its results differ."""
    parser = argparse.ArgumentParser(prog="python -m tenuto_lab.gpu_check.same_results", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the results")
    given = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        try:
            found[way] = {"difference": measure(way, given.device)}
            if not found[way]["difference"] <= LARGEST_DIFFERENCE:  # not a number is a difference too
                found[way]["failed"] = f"results differ by {found[way]['difference']:.3g} of the largest"
        except Exception as error:  # any refusal of this device is the result
            found[way] = {"failed": in_words(error)}
    Results(given.output).write("same-results.json", found)
    return 1 if any("failed" in result for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
