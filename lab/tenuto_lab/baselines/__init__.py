"""Placement policies that papers compare theirs with, and that nobody would choose to serve with."""
