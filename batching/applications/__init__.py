"""Applications: which requests of a call go out when, by when each must be answered, and when all is given up.

No I/O and no clock: the gateway, the Python handle and virtual time run the same objects.
"""
