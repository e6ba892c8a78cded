"""A run before its first step, and its batches: data, models, samplers, rollouts."""
