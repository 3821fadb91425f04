"""Tenuto: multi-model GPU serving with latency SLOs on Ray Serve.

The package itself imports nothing, so that `tenuto.placement` or `tenuto.batching` can be used without Ray or torch.
"""

__version__ = "0.1.0"
