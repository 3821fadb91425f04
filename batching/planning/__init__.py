"""Planning with the scheduler in mind: plans are tried in virtual time before one is chosen."""
