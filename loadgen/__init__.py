"""Arrivals, clients, outcomes, goodput, reports."""
