"""Settings that have to be in the environment before Ray starts anywhere in the test session."""

import os

# Without this a local Ray writes a token into the home folder, which later locks out a plain `ray start` and `serve
# deploy`.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
