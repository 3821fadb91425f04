"""How a profile is measured: the profiler, its worker processes, telemetry and kernels."""
