"""Access: the keys of clients, and what each client may do."""
