"""What a network needs on a GPU type, estimated from its operators and from profiles of other networks."""
