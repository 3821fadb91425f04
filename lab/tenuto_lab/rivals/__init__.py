"""The schedulers Tenuto's is compared with, each on the same core interface and each after its own paper or program.

What the sources leave open is stated in each class with the reading taken; lab/journal/rivals.md compares the results
with the published ones. None of them sends a batch to a gpu-let that is still running: with a network delay a gpu-let
idles until the next batch's data has come, as it does in these systems.
"""
