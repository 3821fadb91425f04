"""The profiler, which measures profiles: its worker processes, telemetry and kernels."""
