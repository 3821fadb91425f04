"""Instruments that only tests use: scenario files, their replay on the served side, a loop without a real clock."""
