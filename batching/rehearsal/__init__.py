"""Rehearsals: replays of recent requests with other values of `hold` and `defend`. They run beside the scheduler."""
