"""Programs that generate: step times fitted to published measurements."""
