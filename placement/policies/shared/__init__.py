"""What several policy families share: the pool of GPUs, requirements in percent, and making the plan."""
