"""Benchmarks: modules to run that print one JSON line last; peers run in turn with ours."""
