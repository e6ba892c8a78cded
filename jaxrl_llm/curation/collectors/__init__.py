"""Collectors: they choose the prompts of a batch, their rollouts, and the groups that train."""
