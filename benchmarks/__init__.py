"""Benchmarks: each is a module to run that prints one JSON line last; peers run in turn with ours."""
