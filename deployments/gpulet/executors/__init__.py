"""Executors, which run batches: PyTorch on CPU or CUDA, or an emulated GPU."""
