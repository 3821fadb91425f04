"""The senders: HTTP and the Python handle."""
