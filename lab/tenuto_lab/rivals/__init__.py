"""Rivals: the schedulers that Tenuto's scheduler is compared with. All have the same interface, and each follows its
own paper or program.

Where a source leaves something open, the class says so and names the reading taken. lab/journal/rivals.md compares the
results with the published ones. No rival sends a batch to a gpu-let that still runs another. With a network delay, a
gpu-let therefore idles until the data of its next batch has come, as it does in the published systems.
"""
