"""Symphony: every GPU of a sub-cluster holds all of its models; how models are split into sub-clusters."""
