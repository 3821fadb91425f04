"""First-fit decreasing, the plain baseline."""
