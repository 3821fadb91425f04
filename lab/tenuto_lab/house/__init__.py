"""Counts of Tenuto's own sources: lines of code by room, and constants by the source of their values."""
