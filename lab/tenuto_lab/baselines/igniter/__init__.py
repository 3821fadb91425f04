"""iGniter and the baselines of its paper."""
