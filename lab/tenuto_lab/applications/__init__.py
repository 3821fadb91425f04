"""Rules for the deadlines of applications' stages, ours beside those of papers, on random graphs in virtual time."""
