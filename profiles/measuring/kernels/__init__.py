"""Kernels of one batch: how they were launched, what they occupied, and what whole-model metrics follow from them."""
