"""Bytes to exchanges: HTTP/1.1, HTTP/2, TLS, and the limits on what clients may use."""
