"""How the constants of interference models that are shipped, or derived for experiments, were found."""
