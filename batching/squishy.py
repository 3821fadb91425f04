"""Squishy bin packing for the schedulers. The algorithm is a placement decision and lives in `tenuto.placement`."""

from tenuto.placement.squishy import Bin, Demand, Part, fill, full_batch, pack

__all__ = ["Bin", "Demand", "Part", "fill", "full_batch", "pack"]
