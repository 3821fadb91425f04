"""Estimates of models from single kernels: operators are timed where they run; our method, and USHER's as published."""
