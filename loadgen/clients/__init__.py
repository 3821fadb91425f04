"""Load clients: one client, groups of clients on a thread or as Ray actors, and how they send at exact times."""
