"""Trees of rollouts: where they fork, and which branches are kept."""
