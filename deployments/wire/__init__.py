"""The traffic between our processes: frames, messages, connections and bundles."""
