"""Operator-graph merging: models on one gpu-let that hold equal weights store and run them once (USHER §3.4).

Importing this package imports no torch; `tenuto.profiles.networks.merging.merge` does, when models are merged.
"""
