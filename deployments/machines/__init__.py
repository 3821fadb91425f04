"""The checks of `tenuto doctor`: the environment, GPUs and CUDA MPS, each with its cure."""
