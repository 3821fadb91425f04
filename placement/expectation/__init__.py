"""What a plan may promise: latency on each share beside its neighbours, and the goodput that follows from queueing."""
