"""gpulet, its baselines and the exhaustive ideal: models that take turns on shares of GPUs."""
