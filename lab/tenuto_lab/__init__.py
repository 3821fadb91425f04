"""Tenuto's laboratory: everything that exists for papers, figures and experiments.

The laboratory may import all of Tenuto; Tenuto never imports the laboratory. Policies, schedulers and verbs of the
laboratory register themselves as entry points.
"""
