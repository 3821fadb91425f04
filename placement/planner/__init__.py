"""Everything that makes plans: from nothing, near a plan that runs, or in its place when that is worth the change."""
