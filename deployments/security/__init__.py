"""Who may ask: keys of clients, and what each of them may do."""
