"""Which model runs in which cell of a fleet, and how much of its traffic goes there. Pure: files in, files out."""
