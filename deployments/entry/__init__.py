"""The way in: HTTP, the Open Inference Protocol, the Python handle."""
