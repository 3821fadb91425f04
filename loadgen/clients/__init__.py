"""Who sends: one client, several as a group on a thread or as Ray actors, and how each keeps to its times."""
