"""How a plan becomes Ray Serve applications."""
