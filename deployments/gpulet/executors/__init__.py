"""What runs batches: PyTorch on CPU or CUDA, or an emulated GPU."""
