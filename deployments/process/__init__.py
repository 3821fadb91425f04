"""What every process of ours needs: its own event loop, limits on waiting, its Ray, and a way to end."""
