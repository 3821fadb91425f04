"""The controller: keeps the plan true while rates, latencies, GPUs and workloads change."""
