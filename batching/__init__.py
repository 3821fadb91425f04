"""When which requests run as one batch: the schedulers, their two drivers."""
