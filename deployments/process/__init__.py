"""What every process of ours needs, whatever it does: limits on waiting, a way to end."""
