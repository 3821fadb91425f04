"""Kernels of one batch: their launches, their occupancy, and metrics of the whole model from them."""
