"""What a plan may promise: latency on each share beside its neighbours, and goodput by queueing theory."""
