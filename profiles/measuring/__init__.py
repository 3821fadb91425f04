"""How a profile is measured: the profiler, its worker processes, co-runs, telemetry and kernels."""
