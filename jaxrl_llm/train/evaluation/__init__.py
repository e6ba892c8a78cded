"""Held-out evaluation: accuracy, pass@k and its intervals."""
