"""What was just offered is replayed with other values of `hold` and `defend`; beside the scheduler, not part of it."""
