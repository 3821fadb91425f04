"""What crosses processes: frames, messages, connections, bundles."""
