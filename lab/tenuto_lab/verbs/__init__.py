"""Verbs of the command line that the laboratory adds, one module each."""
