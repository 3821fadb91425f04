"""One file per placement policy."""
