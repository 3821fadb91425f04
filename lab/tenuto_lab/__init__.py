"""Tenuto's laboratory: what exists for papers, figures and experiments. It may import all of Tenuto; nothing there
imports it. Policies, schedulers and verbs of the laboratory register themselves by entry points."""
