"""When which requests run as one batch: the scheduler core, its rivals, its two drivers."""
