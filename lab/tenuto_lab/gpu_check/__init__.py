"""Finds out what a GPU does, and what CUDA MPS does on it: `scripts/gpu_check`."""
