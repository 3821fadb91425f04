"""CUDA MPS daemons, shares and the GPU inventory."""
