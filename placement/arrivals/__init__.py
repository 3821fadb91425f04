"""How requests arrive: as workloads state it, and as times from a seeded generator."""
