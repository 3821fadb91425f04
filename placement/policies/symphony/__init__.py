"""Symphony: every GPU of a sub-cluster holds all its models; splitting models into sub-clusters."""
