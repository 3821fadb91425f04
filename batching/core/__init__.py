"""The scheduler core: what every scheduler is, and deferred batching."""
