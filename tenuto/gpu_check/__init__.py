"""What is measured of a GPU machine: models, sharing, streaming; behind `scripts/gpu_check`."""
