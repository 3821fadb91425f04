"""Fits of the constants of interference models: of those that are shipped, and of those derived for experiments."""
