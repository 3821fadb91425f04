"""What operators see: status, metrics, environment checks."""
