"""What operators see: the status, metrics and web pages."""
