"""How a plan becomes Ray Serve applications, and how they are brought up and down."""
