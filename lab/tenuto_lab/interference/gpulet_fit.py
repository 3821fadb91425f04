"""The constants of gpulet's linear interference model, fitted on measured pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenuto.errors import refused
from tenuto.placement.interference.gpulet_linear import GpuletLinear, l2_and_dram
from tenuto_lab.interference.measurements import Sample


def fit_gpulet_linear(samples: Sequence[Sample]) -> GpuletLinear:
    """Fit the five constants by least squares on the factors, as the paper does.

    Args:
        samples: measured pairs; each has exactly one neighbour.

    Raises:
        InvalidInputError: samples with several neighbours, or too few different ones to determine five constants.
    """
    if any(len(sample.neighbours) != 1 for sample in samples):
        raise refused("measurements", "several neighbours", "the fit takes pairs", "Give pairs only.")
    rows = [(*l2_and_dram(sample.gpulet, False), *l2_and_dram(sample.neighbours[0], False), 1.0) for sample in samples]
    matrix = np.asarray(rows, dtype=float).reshape(len(rows), 5)
    if np.linalg.matrix_rank(matrix) < 5:
        rule = "five constants need samples that differ in L2 and DRAM utilisation of both models"
        raise refused("measurements", f"{len(rows)} samples", rule, "Measure more models and batches.")
    factors = np.asarray([sample.slowdown for sample in samples], dtype=float)
    l2_own, dram_own, l2_other, dram_other, constant = np.linalg.lstsq(matrix, factors, rcond=None)[0].tolist()
    return GpuletLinear(l2_own, l2_other, dram_own, dram_other, constant)
