"""USHER and WAO-USHER: grouping, then batch sizes, replicas and GPUs group by group."""
